#!/usr/bin/env bash
# LAMBADA accuracy of NVIDIA's megatron_lm_345m, laid in checkpoint_dist_test/release/mp_rank_00/ with
# "release" in checkpoint_dist_test/latest_checkpointed_iteration.txt: bash test_gpt_distributed_sample.sh
# Settings are environment variables; README.md of this folder lists them.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=env_npu.sh
source "$here/env_npu.sh"
# shellcheck source=evaluate.sh
source "$here/evaluate.sh"

parse_options no "$@"
PRESET=${PRESET:-full}
TP=${TP:-1}
PP=${PP:-1}
evaluate 1024 "${CHECKPOINT_PATH:-$here/checkpoint_dist_test}" --fp16
