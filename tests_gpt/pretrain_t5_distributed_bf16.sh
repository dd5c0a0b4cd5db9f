#!/usr/bin/env bash
# Pre-train a T5 in bf16, on what tests/dataset_preprocess_t5.sh has made: bash pretrain_t5_distributed_bf16.sh
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=train.sh
source "$here/train.sh"

parse_options no "$@"
train_t5 t5-bf16
