#!/usr/bin/env bash
# LAMBADA accuracy of the checkpoint that pretrain_gpt_distributed.sh has left: bash test_gpt_distributed.sh
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=evaluate.sh
source "$here/evaluate.sh"

parse_options no "$@"
evaluate fp16
