#!/usr/bin/env bash
# JSON lines of text (WikiExtractor's --json) to a T5 or BERT dataset: bash tests/dataset_preprocess_t5.sh
#
# Runs the stock tools/preprocess_data.py, which needs the package nltk and its data punkt_tab.
# Environment: DATA_DIR (default ./dataset/en_wiki) with bert-large-uncased-vocab.txt, else copied there from the
# current folder, in which my-t5_text_sentence.bin and .idx will be; INPUT, a file or WikiExtractor's folder
# (default ./text); WORKERS.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../tests_gpt/common.sh
source "$here/../tests_gpt/common.sh"

parse_options no "$@"
data=${DATA_DIR:-dataset/en_wiki}
input=${INPUT:-text}
vocab=$data/bert-large-uncased-vocab.txt
[ -e "$input" ] || fail "no $input; set INPUT to WikiExtractor's output"
take_downloaded "$vocab"
require_file "$vocab" "DATA_DIR (https://s3.amazonaws.com/models.huggingface.co/bert/$(basename "$vocab") is one)"
"$python" -c 'import nltk; nltk.data.find("tokenizers/punkt_tab")' 2>/dev/null ||
    fail "sentences are split with nltk: pip install nltk && $python -m nltk.downloader punkt_tab"
require_checkout
joined=$(mktemp)
trap 'rm -f "$joined"' EXIT
find -L "$input" -type f -print0 | sort -z | xargs -0 cat > "$joined"
"$python" -m megatron_npu run "$checkout/tools/preprocess_data.py" --input "$joined" \
    --output-prefix "$data/my-t5" --vocab-file "$vocab" --tokenizer-type BertWordPieceLowerCase \
    --dataset-impl mmap --split-sentences --chunk-size 25 --workers "${WORKERS:-$(nproc)}"
