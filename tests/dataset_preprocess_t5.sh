#!/usr/bin/env bash
# JSON lines of text (WikiExtractor's --json) to a T5 or BERT dataset: bash tests/dataset_preprocess_t5.sh,
# and, because the guide trains a GPT next, the GPT dataset in ./dataset/gpt (as tests/dataset_preprocess_gpt.sh).
#
# Runs the stock tools/preprocess_data.py, which needs the package nltk and its data punkt_tab.
# Environment: DATA_DIR (default ./dataset/en_wiki) with bert-large-uncased-vocab.txt, else copied there from the
# current folder, in which my-t5_text_sentence.bin and .idx will be; INPUT, a file or WikiExtractor's folder
# (default ./text); WORKERS; GPT=no leaves the GPT dataset out.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tests=$here
# shellcheck source=../tests_gpt/common.sh
source "$here/../tests_gpt/common.sh"

# require_sentence_model: end unless nltk can split sentences; its data is fetched where that can be done.
require_sentence_model() {
    local found='import nltk; nltk.data.find("tokenizers/punkt_tab")'
    "$python" -c "$found" 2>/dev/null && return
    echo "Fetching nltk's punkt_tab, which splits sentences"
    timeout 120 "$python" -m nltk.downloader -q punkt_tab >/dev/null 2>&1 || true
    "$python" -c "$found" 2>/dev/null ||
        fail "sentences are split with nltk: pip install nltk && $python -m nltk.downloader punkt_tab"
}

# make_gpt_dataset: run the other script, unless GPT-2's vocabulary cannot be had.
make_gpt_dataset() {
    take_gpt_vocabulary dataset/gpt
    if [ -f dataset/gpt/gpt2-vocab.json ] && [ -f dataset/gpt/gpt2-merges.txt ]; then
        DATA_DIR=dataset/gpt bash "$tests/dataset_preprocess_gpt.sh"
    else
        echo "No GPT dataset: put gpt2-vocab.json and gpt2-merges.txt here and run: bash tests/dataset_preprocess_gpt.sh"
    fi
}

parse_options no "$@"
data=${DATA_DIR:-dataset/en_wiki}
input=${INPUT:-text}
vocab=$data/bert-large-uncased-vocab.txt
[ -e "$input" ] || fail "no $input; set INPUT to WikiExtractor's output"
take_downloaded "$vocab"
require_file "$vocab" "DATA_DIR (https://s3.amazonaws.com/models.huggingface.co/bert/$(basename "$vocab") is one)"
require_sentence_model
require_checkout
joined=$(mktemp)
trap 'rm -f "$joined"' EXIT
find -L "$input" -type f -print0 | sort -z | xargs -0 cat > "$joined"
"$python" -m megatron_npu run "$checkout/tools/preprocess_data.py" --input "$joined" \
    --output-prefix "$data/my-t5" --vocab-file "$vocab" --tokenizer-type BertWordPieceLowerCase \
    --dataset-impl mmap --split-sentences --chunk-size 25 --workers "${WORKERS:-$(nproc)}"
[ "${GPT:-yes}" = no ] || make_gpt_dataset
