# shellcheck shell=bash
# shellcheck disable=SC2154  # set by common.sh
# The LAMBADA evaluation of the test_* scripts; they source it after common.sh and call evaluate.

# evaluate SEQ_LENGTH CHECKPOINT FLAG...: print the accuracy of the stock tasks/main.py --task LAMBADA.
evaluate() {
    local length=$1 checkpoint=$2
    shift 2
    require_checkout
    detect_devices
    choose_sizes "$length"
    devices=$((TP * PP)) # one model: data-parallel ranks would make upstream count some examples twice
    echo "Evaluating on $devices x $device (TP=$TP, PP=$PP, as the checkpoint was trained)"
    : "${LAMBADA_FILE:=$here/lambada_test.json}"
    require_file "$LAMBADA_FILE" LAMBADA_FILE
    require_file "$checkpoint/latest_checkpointed_iteration.txt" CHECKPOINT_PATH
    launch run "$checkout/tasks/main.py" --task LAMBADA --strict-lambada --valid-data "$LAMBADA_FILE" \
        "${model[@]}" --load "$checkpoint" --no-load-optim --no-load-rng --log-interval 10 "$@"
}
