# shellcheck shell=bash
# shellcheck disable=SC2154  # set by common.sh
# The training of the pretrain_* scripts; they source it after common.sh and call train.

# train SEQ_LENGTH FLAG...: pre-train on the checkout, else with the embedded driver on megatron-core.
train() {
    local length=$1 run
    shift
    detect_devices
    choose_sizes "$length"
    : "${DATA_PATH:=$DATA_DIR/my-gpt_text_document}"
    require_file "$DATA_PATH.idx" DATA_PATH
    provide_checkout
    run=(
        "${model[@]}" --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_ITERS"
        --lr "${LR:-1.5e-4}" --min-lr "${MIN_LR:-1e-5}" --lr-decay-style cosine
        --lr-decay-iters "$LR_DECAY_ITERS" --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0
        --data-path "$DATA_PATH" --split "$SPLIT" --save "$CHECKPOINT_PATH"
        --save-interval "$SAVE_INTERVAL" --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
        --log-interval "$LOG_INTERVAL" --initial-loss-scale "$INITIAL_LOSS_SCALE" "$@"
    )
    if [ -f "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
        run+=(--load "$CHECKPOINT_PATH")
        if written_by_driver "$CHECKPOINT_PATH" && [ -n "$checkout" ]; then
            fail "the checkpoint in $CHECKPOINT_PATH is one of megatron-core, not of $checkout; set CHECKPOINT_PATH"
        elif ! written_by_driver "$CHECKPOINT_PATH" && [ -z "$checkout" ]; then
            fail "the checkpoint in $CHECKPOINT_PATH needs a Megatron-LM checkout; set MEGATRON_LM_PATH or CHECKPOINT_PATH"
        fi
        refuse_finished
    fi
    if [ -n "$checkout" ]; then
        launch run "$checkout/pretrain_gpt.py" "${run[@]}" --data-impl mmap
    else
        echo "No Megatron-LM checkout: running the embedded driver on megatron-core"
        launch pretrain "${run[@]}"
    fi
}

# refuse_finished: end if the checkpoint has all iterations already, as after another command of the guide.
refuse_finished() {
    local reached
    reached=$(cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt")
    if [[ $reached =~ ^[0-9]+$ ]] && [ "$reached" -ge "$TRAIN_ITERS" ]; then
        fail "nothing left to train: the checkpoint in $CHECKPOINT_PATH has $reached of $TRAIN_ITERS iterations;" \
            "move it away, set CHECKPOINT_PATH to another folder, or TRAIN_ITERS to more"
    fi
    echo "Going on from iteration $reached in $CHECKPOINT_PATH"
}
