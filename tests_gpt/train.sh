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
    find_checkout
    run=(
        "${model[@]}" --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_ITERS"
        --lr "${LR:-1.5e-4}" --min-lr "${MIN_LR:-1e-5}" --lr-decay-style cosine
        --lr-decay-iters "$LR_DECAY_ITERS" --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0
        --data-path "$DATA_PATH" --split "$SPLIT" --save "$CHECKPOINT_PATH"
        --save-interval "$SAVE_INTERVAL" --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
        --log-interval "$LOG_INTERVAL" --initial-loss-scale "$INITIAL_LOSS_SCALE" "$@"
    )
    [ -f "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ] && run+=(--load "$CHECKPOINT_PATH")
    if [ -n "$checkout" ]; then
        launch run "$checkout/pretrain_gpt.py" "${run[@]}" --data-impl mmap
    else
        echo "No Megatron-LM checkout (scripts/get_megatron.sh fetches one): running on megatron-core"
        launch pretrain "${run[@]}"
    fi
}
