# shellcheck shell=bash
# shellcheck disable=SC2154  # set by common.sh
# The LAMBADA evaluation of the test_* scripts; they source it after common.sh and call evaluate.

# evaluate SEQ_LENGTH CHECKPOINT FLAG...: print the accuracy of the stock tasks/main.py --task LAMBADA; of a
# checkpoint that the embedded driver has written, the accuracy of megatron-npu lambada, which asks the same.
evaluate() {
    local length=$1 checkpoint=$2
    shift 2
    detect_devices
    : "${LAMBADA_FILE:=$here/lambada_test.json}"
    require_file "$LAMBADA_FILE" LAMBADA_FILE
    require_file "$checkpoint/latest_checkpointed_iteration.txt" CHECKPOINT_PATH
    local task=(--valid-data "$LAMBADA_FILE" --strict-lambada --load "$checkpoint")
    if written_by_driver "$checkpoint"; then
        devices=1 # whatever layout it was trained in
        echo "Evaluating on 1 x $device (a checkpoint of megatron-core, put together)"
        launch lambada "${task[@]}" "$@"
        return
    fi
    choose_sizes "$length"
    require_checkout
    devices=$((TP * PP)) # one model: data-parallel ranks would make upstream count some examples twice
    echo "Evaluating on $devices x $device (TP=$TP, PP=$PP, as the checkpoint was trained)"
    launch run "$checkout/tasks/main.py" --task LAMBADA "${task[@]}" "${model[@]}" \
        --no-load-optim --no-load-rng --log-interval 10 "$@"
}
