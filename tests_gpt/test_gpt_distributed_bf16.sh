#!/usr/bin/env bash
# LAMBADA accuracy in bf16 with fused attention, of the checkpoint of pretrain_gpt_distributed_bf16.sh:
#   bash test_gpt_distributed_bf16.sh --pre=65536 --next=65536 --shape_order=SBH   causal
#   bash test_gpt_distributed_bf16.sh --pre=2048 --next=0 --shape_order=BSH        a sliding window
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=evaluate.sh
source "$here/evaluate.sh"

parse_options yes "$@"
attention_flags
evaluate bf16 "${attention[@]}"
