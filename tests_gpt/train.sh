# shellcheck shell=bash
# shellcheck disable=SC2154  # set by common.sh
# The training of the pretrain_* scripts; they source it after common.sh and call train_gpt or train_t5.

# train_gpt PRECISION SEQ_LENGTH FLAG...: pre-train a GPT on the checkout, else with the built-in trainer on
# megatron-core.
train_gpt() {
    local precision=$1 length=$2
    shift 2
    detect_devices
    choose_sizes "$length"
    choose_schedule
    gpt_files
    : "${DATA_PATH:=$DATA_DIR/my-gpt_text_document}"
    require_made "$DATA_PATH.idx" DATA_PATH gpt
    announce "$SEQ_LENGTH tokens"
    provide_checkout
    begin_run "$precision"
    run+=(
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --lr-decay-style cosine
        --initial-loss-scale "$INITIAL_LOSS_SCALE" "$@"
    )
    if [ -n "$checkout" ]; then
        launch run "$checkout/pretrain_gpt.py" "${run[@]}" --data-impl mmap
    else
        echo "No Megatron-LM checkout: running the built-in trainer on megatron-core"
        launch pretrain "${run[@]}"
    fi
}

# train_t5 PRECISION: pre-train a T5 on the checkout.
train_t5() {
    detect_devices
    choose_t5_sizes
    choose_schedule
    : "${DATA_DIR:=$root/dataset/en_wiki}"
    : "${VOCAB_FILE:=$DATA_DIR/bert-large-uncased-vocab.txt}" "${DATA_PATH:=$DATA_DIR/my-t5_text_sentence}"
    require_made "$VOCAB_FILE" VOCAB_FILE t5
    require_made "$DATA_PATH.idx" DATA_PATH t5
    tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE" --vocab-extra-ids 100)
    announce "$SEQ_LENGTH and $DECODER_SEQ_LENGTH tokens"
    require_checkout
    begin_run "$1"
    run+=(
        --encoder-seq-length "$SEQ_LENGTH" --decoder-seq-length "$DECODER_SEQ_LENGTH"
        --max-position-embeddings "$SEQ_LENGTH" --lr-decay-style linear
        --initial-loss-scale "$INITIAL_LOSS_SCALE" --data-impl mmap
    )
    launch run "$checkout/pretrain_t5.py" "${run[@]}"
}

# choose_t5_sizes: as choose_sizes; full is T5 base.
choose_t5_sizes() {
    local small_length=128
    if [ "$preset" = tiny ]; then
        small_length=64
        : "${INITIAL_LOSS_SCALE:=256}" # its gradients are larger than those of a GPT
    elif [ "$preset" = full ]; then
        : "${NUM_LAYERS:=12}" "${HIDDEN_SIZE:=768}" "${NUM_HEADS:=12}" "${SEQ_LENGTH:=512}" "${MICRO_BATCH:=16}"
        : "${GLOBAL_BATCH:=$((MICRO_BATCH * total))}" "${TRAIN_ITERS:=1000000}" "${LR_DECAY_ITERS:=1000000}"
        : "${LR:=1e-4}" "${TP:=1}" "${PP:=1}"
    fi
    : "${SEQ_LENGTH:=$small_length}"
    : "${DECODER_SEQ_LENGTH:=$((SEQ_LENGTH / 4))}"
    choose_sizes "$SEQ_LENGTH"
}

# choose_schedule: set how long and how fast to train; every value can be given in the environment.
choose_schedule() {
    local each=$((MICRO_BATCH * total / (TP * PP))) # samples of the smallest global batch
    if [ "$preset" = full ]; then
        : "${GLOBAL_BATCH:=$(((64 + each - 1) / each * each))}"
        : "${TRAIN_ITERS:=500000}" "${LR_DECAY_ITERS:=320000}" "${SAVE_INTERVAL:=10000}"
        : "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}" "${LOG_INTERVAL:=100}"
        : "${INITIAL_LOSS_SCALE:=4294967296}" "${SPLIT:=949,50,1}"
    elif [ "$preset" = tiny ]; then # learns the commonest words in its few iterations
        : "${TRAIN_ITERS:=30}" "${LR:=2e-2}" "${INITIAL_LOSS_SCALE:=4096}"
    fi
    : "${GLOBAL_BATCH:=$each}" "${TRAIN_ITERS:=10}"
    : "${LR_DECAY_ITERS:=$TRAIN_ITERS}" "${SAVE_INTERVAL:=$TRAIN_ITERS}" "${EVAL_INTERVAL:=$TRAIN_ITERS}"
    : "${EVAL_ITERS:=1}" "${LOG_INTERVAL:=1}" "${SPLIT:=90,10,0}" "${LR:=1.5e-4}"
    : "${INITIAL_LOSS_SCALE:=65536}" # fp16 would need some 15 skipped steps to find it
}

# announce LENGTHS: say what will be trained, and how to change it.
announce() {
    echo "${preset^} preset on $devices x $device$simulated, TP $TP, PP $PP: $NUM_LAYERS layers of $HIDDEN_SIZE," \
        "$1, $TRAIN_ITERS iterations (PRESET=full, small or tiny, or NUM_LAYERS, HIDDEN_SIZE, ... change it)"
}

# begin_run PRECISION: set run to the flags that all models share; go on from the command's checkpoint if there is
# one, or with FRESH=1 keep it under another name.
begin_run() {
    choose_folder "$1"
    run=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" "${tokenizer[@]}"
        --train-iters "$TRAIN_ITERS" --lr "$LR" --min-lr "${MIN_LR:-1e-5}" --lr-decay-iters "$LR_DECAY_ITERS"
        --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 "--${1##*-}"
        --data-path "$DATA_PATH" --split "$SPLIT" --save "$CHECKPOINT_PATH" --save-interval "$SAVE_INTERVAL"
        --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS" --log-interval "$LOG_INTERVAL"
    )
    if [ "${FRESH:-0}" = 1 ]; then
        [ "${NODE_RANK:-0}" -ne 0 ] || keep_former
    elif [ -f "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
        # the schedule is this command's: TRAIN_ITERS may have become more
        run+=(--load "$CHECKPOINT_PATH" --override-opt_param-scheduler)
        refuse_other_kind
        refuse_finished
    fi
    [ "${NODE_RANK:-0}" -ne 0 ] || note_settings
    echo "Checkpoints: $CHECKPOINT_PATH"
}

# choose_folder PRECISION: set CHECKPOINT_PATH. What Megatron cannot go on from, a checkpoint of another model, layout or
# batch, as when a command is given on one card and then on eight, stays where it is, and this one gets a folder beside it.
choose_folder() {
    local given=${CHECKPOINT_PATH:-} former
    settings="$NUM_LAYERS-layers-of-$HIDDEN_SIZE-$NUM_HEADS-heads-$SEQ_LENGTH-tokens-tp$TP-pp$PP-batch$GLOBAL_BATCH"
    choose_checkpoint "$1"
    former=$(settings_of "$CHECKPOINT_PATH")
    { [ -n "$former" ] && [ "$former" != "$settings" ] && [ "${FRESH:-0}" != 1 ]; } || return 0
    [ -z "$given" ] ||
        fail "the checkpoint in $given is of $former, this run of $settings; set CHECKPOINT_PATH to another folder," \
            "FRESH=1 to keep it and start anew, or the sizes and NPUS_PER_NODE as they were"
    echo "The checkpoint in $CHECKPOINT_PATH is of $former: this run has a folder of its own"
    CHECKPOINT_PATH=$CHECKPOINT_PATH@$settings
}

# settings_of FOLDER: print what its checkpoint was trained with; nothing if there is none, or none that says so.
settings_of() {
    [ ! -f "$1/latest_checkpointed_iteration.txt" ] || cat "$1/settings" 2>/dev/null || true
}

# note_settings: leave beside the checkpoints to come what they were trained with.
note_settings() {
    mkdir -p "$CHECKPOINT_PATH"
    echo "$settings" > "$CHECKPOINT_PATH/settings"
}

# keep_former: give the command's checkpoint folder, if there is one, the first free name behind it.
keep_former() {
    local number=1
    [ -e "$CHECKPOINT_PATH" ] || return 0
    while [ -e "$CHECKPOINT_PATH.$number" ]; do number=$((number + 1)); done
    mv "$CHECKPOINT_PATH" "$CHECKPOINT_PATH.$number"
    echo "The former checkpoints are now in $CHECKPOINT_PATH.$number"
}

# refuse_other_kind: end if the checkpoint is one of the other Megatron.
refuse_other_kind() {
    if written_by_driver "$CHECKPOINT_PATH" && [ -n "$checkout" ]; then
        fail "the checkpoint in $CHECKPOINT_PATH is one of megatron-core, not of $checkout; set CHECKPOINT_PATH"
    elif ! written_by_driver "$CHECKPOINT_PATH" && [ -z "$checkout" ]; then
        fail "the checkpoint in $CHECKPOINT_PATH needs a Megatron-LM checkout; set MEGATRON_LM_PATH or CHECKPOINT_PATH"
    fi
}

# refuse_finished: end if the checkpoint has all iterations already, as when a command is given a second time.
refuse_finished() {
    local reached
    reached=$(cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt")
    if [[ $reached =~ ^[0-9]+$ ]] && [ "$reached" -ge "$TRAIN_ITERS" ]; then
        fail "nothing left to train: the checkpoint in $CHECKPOINT_PATH has $reached of $TRAIN_ITERS iterations;" \
            "set FRESH=1 to keep it and start anew, CHECKPOINT_PATH to another folder, or TRAIN_ITERS to more"
    fi
    echo "Going on from iteration $reached in $CHECKPOINT_PATH"
}
