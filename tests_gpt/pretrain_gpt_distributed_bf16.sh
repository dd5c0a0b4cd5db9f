#!/usr/bin/env bash
# Pre-train a GPT in bf16 with fused attention:
#   bash pretrain_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=SBH   causal
#   bash pretrain_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=BSH        a sliding window
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=train.sh
source "$here/train.sh"

parse_options yes "$@"
attention_flags
train_gpt bf16 4096 "${attention[@]}"
