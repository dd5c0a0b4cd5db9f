#!/usr/bin/env bash
# Pre-train a GPT in fp16: bash pretrain_gpt_distributed.sh
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=train.sh
source "$here/train.sh"

parse_options no "$@"
train_gpt fp16 1024
