#!/usr/bin/env bash
# LAMBADA accuracy of NVIDIA's megatron_lm_345m: bash test_gpt_distributed_sample.sh
# Its model_optim_rng.pt lies in checkpoint_dist_test/mp_rank_00/, or where upstream looks for a release: in
# checkpoint_dist_test/release/mp_rank_00/, with "release" in checkpoint_dist_test/latest_checkpointed_iteration.txt.
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
checkpoint=${CHECKPOINT_PATH:-$here/checkpoint_dist_test}
if [ -f "$checkpoint/mp_rank_00/model_optim_rng.pt" ]; then
    view=$(mktemp -d)
    trap 'rm -rf "$view"' EXIT
    ln -s "$(cd "$checkpoint" && pwd)" "$view/release"
    echo release > "$view/latest_checkpointed_iteration.txt"
    checkpoint=$view
fi
CHECKPOINT_PATH=$checkpoint evaluate fp16
