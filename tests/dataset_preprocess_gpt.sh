#!/usr/bin/env bash
# JSON lines of text (WikiExtractor's --json) to a GPT dataset: bash tests/dataset_preprocess_gpt.sh
#
# Environment: DATA_DIR (default ./dataset/gpt), in which my-gpt_text_document.bin and .idx will be, with
# gpt2-vocab.json and gpt2-merges.txt, else copied there from the current folder, else fetched from the package
# index; INPUT, a file or WikiExtractor's folder (default ./text); WORKERS.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../tests_gpt/common.sh
source "$here/../tests_gpt/common.sh"

parse_options no "$@"
data=${DATA_DIR:-dataset/gpt}
input=${INPUT:-text}
[ -e "$input" ] || fail "no $input; set INPUT to WikiExtractor's output"
take_gpt_vocabulary "$data"
for file in "$data/gpt2-vocab.json" "$data/gpt2-merges.txt"; do
    require_file "$file" "DATA_DIR (https://s3.amazonaws.com/models.huggingface.co/bert/$(basename "$file") is one)"
done
mapfile -d '' files < <(find -L "$input" -type f -print0 | sort -z)
"$python" -m megatron_npu preprocess --input "${files[@]}" --output-prefix "$data/my-gpt" \
    --vocab-file "$data/gpt2-vocab.json" --merge-file "$data/gpt2-merges.txt" --append-eod \
    --workers "${WORKERS:-$(nproc)}"
