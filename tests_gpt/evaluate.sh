# shellcheck shell=bash
# shellcheck disable=SC2154  # set by common.sh
# The LAMBADA evaluation of the test_* scripts; they source it after common.sh and call evaluate.

# evaluate PRECISION FLAG...: print the accuracy of the stock tasks/main.py --task LAMBADA; of a checkpoint that the
# built-in trainer has written, the accuracy of megatron-npu lambada, which asks the same.
evaluate() {
    local precision=$1 task missing="correct CHECKPOINT_PATH"
    shift
    if [ -z "${CHECKPOINT_PATH:-}" ]; then
        missing="train it with pretrain_${0##*/test_} and the same options, or set CHECKPOINT_PATH"
        choose_checkpoint "$precision"
        newest_checkpoint
    fi
    choose_passages
    [ -f "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ] || fail "no checkpoint in $CHECKPOINT_PATH; $missing"
    detect_devices
    task=(--valid-data "$LAMBADA_FILE" --strict-lambada --load "$CHECKPOINT_PATH" "--$precision" "$@")
    if written_by_driver "$CHECKPOINT_PATH"; then
        echo "Evaluating $CHECKPOINT_PATH on $devices x $device$simulated (of megatron-core: each process has all of it)"
        launch lambada "${task[@]}"
        return
    fi
    require_checkout
    read_layout
    share_out
    choose_model
    gpt_files
    echo "Evaluating $CHECKPOINT_PATH on $devices x $device$simulated (TP $TP, PP $PP, as it was trained)"
    launch run "$checkout/tasks/main.py" --task LAMBADA "${task[@]}" "${model[@]}" "${tokenizer[@]}" \
        --micro-batch-size "${MICRO_BATCH:-4}" --no-load-optim --no-load-rng --log-interval 10
}

# choose_passages: set LAMBADA_FILE, which must be there.
choose_passages() {
    [ -n "${LAMBADA_FILE:-}" ] || [ ! -f "$here/lambada_test.jsonl" ] || LAMBADA_FILE=$here/lambada_test.jsonl
    : "${LAMBADA_FILE:=$here/lambada_test.json}"
    require_file "$LAMBADA_FILE" LAMBADA_FILE
}

# read_layout: set TP and PP to those of the newest checkpoint, whose parts tell them, and reached to its iteration.
read_layout() {
    local newest=$CHECKPOINT_PATH/release files last
    reached=$(cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt")
    [ "$reached" = release ] || printf -v newest '%s/iter_%07d' "$CHECKPOINT_PATH" "$reached"
    files=("$newest"/mp_rank_*/model*rng.pt)
    [ -f "${files[0]}" ] || fail "no mp_rank_*/model_optim_rng.pt in $newest; set CHECKPOINT_PATH"
    last=$(basename "$(dirname "${files[-1]}")")
    last=${last#mp_rank_} # 01, or 01_002 of a pipeline
    TP=$((10#${last%%_*} + 1)) PP=1
    [[ $last != *_* ]] || PP=$((10#${last#*_} + 1))
}

# share_out: take as many of the devices as copies of the model need; a CPU may have more processes than it has cores.
share_out() {
    local parts=$((TP * PP))
    [ "$device" = cpu ] || [ "$devices" -ge "$parts" ] ||
        fail "$devices x $device for a checkpoint of TP $TP x PP $PP; expected $parts devices," \
            "or a checkpoint that tools/checkpoint_util.py has cut for fewer (docs/how-to/megatron-lm.md)"
    devices=$((devices < parts ? parts : devices / parts * parts))
    # shellcheck disable=SC2034  # for choose_sizes
    total=$((devices * ${NNODES:-1}))
}

# choose_model: set model to the flags of layout and sizes. A checkpoint has its sizes in itself; NVIDIA's release
# has not, and gets those of the preset.
choose_model() {
    model=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP")
    if [ "$reached" = release ]; then
        choose_sizes 1024
        echo "${preset^} preset: $NUM_LAYERS layers of $HIDDEN_SIZE, $SEQ_LENGTH tokens (a release has no sizes in it)"
        model+=(
            --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
            --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        )
    else
        model+=(--use-checkpoint-args)
    fi
}
