# shellcheck shell=bash
# What the scripts of this folder share; they source it. Nothing runs here.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 # nothing is to be written into the checkout
umask 027                        # files 640, folders 750

# fail WORD...: one line, exit code 2
fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# parse_options ALLOWED ARGUMENT...: set pre, next and shape_order from --pre=P --next=N --shape_order=SBH|BSH.
# With ALLOWED=no the script takes no options. --help prints the comment that the script begins with.
parse_options() {
    local allowed=$1 argument
    shift
    pre='' next='' shape_order=''
    for argument in "$@"; do
        if [ "$argument" = --help ] || [ "$argument" = -h ]; then
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
            exit 0
        fi
        [ "$allowed" = yes ] || fail "no option $argument; settings are environment variables, see $here/README.md"
        case $argument in
            --pre=*) pre=${argument#*=} ;;
            --next=*) next=${argument#*=} ;;
            --shape_order=*) shape_order=${argument#*=} ;;
            *) fail "no option $argument; expected --pre=P --next=N --shape_order=SBH|BSH" ;;
        esac
    done
    [ "$allowed" = yes ] || return 0
    for argument in "pre:$pre" "next:$next"; do
        [[ ${argument#*:} =~ ^[0-9]+$ ]] ||
            fail "--${argument%%:*}=${argument#*:} is not a number of tokens; expected for example --pre=65536 --next=65536"
    done
    [[ $shape_order =~ ^(SBH|BSH)$ ]] || fail "--shape_order=$shape_order; expected SBH or BSH"
}

# find_checkout: set checkout to a Megatron-LM 285068c8, or leave it empty.
find_checkout() {
    local candidate
    checkout=''
    if [ -n "${MEGATRON_LM_PATH:-}" ]; then
        [ -f "$MEGATRON_LM_PATH/pretrain_gpt.py" ] ||
            fail "MEGATRON_LM_PATH=$MEGATRON_LM_PATH has no pretrain_gpt.py; set it to a Megatron-LM checkout"
        checkout=$(cd "$MEGATRON_LM_PATH" && pwd)
        return
    fi
    # the guide clones this project inside Megatron-LM; beside it, or fetched by get_megatron.sh, will do too
    for candidate in "$root/.." "$root/../Megatron-LM" "$root/checkouts/285068c8"; do
        if [ -f "$candidate/megatron/model/transformer.py" ]; then
            checkout=$(cd "$candidate" && pwd)
            return
        fi
    done
}

# provide_checkout: as find_checkout, else fetch one, else say how and leave checkout empty.
provide_checkout() {
    find_checkout
    [ -n "$checkout" ] && return
    echo "No Megatron-LM beside this project: fetching 285068c8 (scripts/get_megatron.sh)"
    if (cd "$root" && timeout 300 bash scripts/get_megatron.sh checkouts 285068c8 >/dev/null 2>&1); then
        find_checkout
    else
        echo "No network: git clone https://github.com/NVIDIA/Megatron-LM elsewhere, check out 285068c8108e0e8e6538," \
            "copy it here and set MEGATRON_LM_PATH to it"
    fi
}

# require_checkout: as provide_checkout, and end if there is none.
require_checkout() {
    provide_checkout
    [ -n "$checkout" ] || fail "no Megatron-LM checkout; set MEGATRON_LM_PATH to one"
}

# written_by_driver FOLDER: whether its checkpoints are those of the embedded driver on megatron-core.
written_by_driver() {
    compgen -G "$1/iter_*/arguments.json" >/dev/null
}

# detect_devices: set device, devices (processes to start) and preset (full on 8 accelerators, else small).
detect_devices() {
    local found
    device=${MEGATRON_NPU_DEVICE:-auto} devices=${NPUS_PER_NODE:-}
    if [ "$device" = auto ] || [ -z "$devices" ]; then # else there is nothing to ask
        found=$("$python" -c '
import sys
from megatron_npu import devices, errors
try:
    device = devices.current()
    print(device.name, device.count())
except errors.UsageError as error:
    sys.exit(f"{sys.argv[1]}: error: {error}")' "$(basename "$0")") || exit 2
        read -r device devices <<< "$found"
    fi
    devices=${NPUS_PER_NODE:-$devices}
    [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "NPUS_PER_NODE=$devices is not a number of processes"
    preset=${PRESET:-$([ "$device" != cpu ] && [ "$devices" -ge 8 ] && echo full || echo small)}
    [[ $preset =~ ^(full|small)$ ]] || fail "PRESET=$preset; expected full or small"
}

# choose_sizes SEQ_LENGTH: set the model's sizes; every one can be given in the environment.
# full is GPT-2 345M, the size of the guide; small runs in minutes on a CPU.
choose_sizes() {
    if [ "$preset" = full ]; then
        : "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=1024}" "${NUM_HEADS:=16}" "${SEQ_LENGTH:=$1}"
        : "${MICRO_BATCH:=4}" "${GLOBAL_BATCH:=64}" "${TRAIN_ITERS:=500000}" "${TP:=2}" "${PP:=2}"
        : "${LR_DECAY_ITERS:=320000}" "${SAVE_INTERVAL:=10000}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}"
        : "${LOG_INTERVAL:=100}" "${INITIAL_LOSS_SCALE:=4294967296}" "${SPLIT:=949,50,1}"
    else
        : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${NUM_HEADS:=4}" "${SEQ_LENGTH:=128}"
        : "${MICRO_BATCH:=1}" "${GLOBAL_BATCH:=$devices}" "${TRAIN_ITERS:=10}" "${TP:=1}" "${PP:=1}"
        : "${LR_DECAY_ITERS:=$TRAIN_ITERS}" "${SAVE_INTERVAL:=$TRAIN_ITERS}" "${EVAL_INTERVAL:=$TRAIN_ITERS}"
        : "${EVAL_ITERS:=1}" "${LOG_INTERVAL:=1}" "${SPLIT:=90,10,0}"
        : "${INITIAL_LOSS_SCALE:=65536}" # fp16 would need some 15 skipped steps to find it
        echo "Small preset on $devices x $device: $NUM_LAYERS layers of $HIDDEN_SIZE, $SEQ_LENGTH tokens," \
            "$TRAIN_ITERS iterations (PRESET=full, or NUM_LAYERS, HIDDEN_SIZE, ... change it)"
    fi
    model=(
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$NUM_HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --micro-batch-size "$MICRO_BATCH" --tokenizer-type GPT2BPETokenizer
    )
    : "${DATA_DIR:=$root/dataset/gpt}"
    : "${VOCAB_FILE:=$DATA_DIR/gpt2-vocab.json}" "${MERGE_FILE:=$DATA_DIR/gpt2-merges.txt}"
    require_file "$VOCAB_FILE" VOCAB_FILE
    require_file "$MERGE_FILE" MERGE_FILE
    model+=(--vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
    : "${CHECKPOINT_PATH:=$here/checkpoint}"
}

# require_file FILE VARIABLE
require_file() {
    [ -f "$1" ] || fail "no file $1; set $2"
}

# take_downloaded FILE: copy FILE here from the current folder, where the guide downloads it, unless it is here.
take_downloaded() {
    local name
    name=$(basename "$1")
    if [ ! -e "$1" ] && [ -f "$name" ]; then
        echo "Copying $name to $(dirname "$1")"
        mkdir -p "$(dirname "$1")"
        cp "$name" "$1.part"
        mv "$1.part" "$1"
    fi
}

# attention_flags: set attention to the flags that --pre, --next and --shape_order mean.
attention_flags() {
    # shellcheck disable=SC2034  # for the script that sources this file
    attention=(--use-flash-attn --pre-tockens "$pre" --next-tockens "$next" --shape-order "$shape_order")
}

# launch ARGUMENT...: run megatron_npu in $devices processes on this node, under torchrun if there are several.
launch() {
    local meeting=(--standalone)
    if [ "${NNODES:-1}" -eq 1 ] && [ "$devices" -eq 1 ]; then
        "$python" -m megatron_npu "$@"
        return
    fi
    if [ "${NNODES:-1}" -gt 1 ]; then
        meeting=(
            --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}"
            --master-addr "${MASTER_ADDR:?the address of node 0}" --master-port "${MASTER_PORT:-6000}"
        )
    fi
    "$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$devices" -m megatron_npu "$@"
}
