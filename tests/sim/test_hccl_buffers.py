"""--hccl-group-buffer-adaptive: no message is larger than what was computed, and losses are the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ROOT
from tests.support import tiny, warm
from tests.support.tiny_dataset import dataset

__all__ = ["dataset"]

HERE = Path(__file__).resolve().parent
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear --swiglu "
    "--normalization RMSNorm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
)
CASES = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "cp2": "--context-parallel-size 2",
    "ep2": f"{_EXPERTS} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
MODEL = "--bf16 --micro-batch-size 2 --train-iters 2 --eval-iters 0 --no-plot --num-workers 0"


def test_buffers_hold_the_largest_message(simulated, dataset, tmp_path):
    listed = tmp_path / "cases.json"
    listed.write_text(json.dumps(CASES))
    flags = [*tiny.flags_for(dataset), *MODEL.split()]
    program = [str(HERE / "buffers_worker.py"), str(listed), str(tmp_path), *flags]
    ranks = ["python", str(HERE / "ranks.py"), "--torch", "2", *program]
    done = simulated(*ranks, modules=warm.DRIVER, MEGATRON_NPU_SIM_HCCL_TIMEOUT="60", cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:]
    assert [f"rank {rank}: done" in done.stdout for rank in range(2)] == [True, True], done.stdout[-6000:]
    assert (
        "HCCL's buffers for group tp have 2 x 1 MiB instead of 2 x 200 MiB, which is 398 MiB less"
        in done.stdout
    )
    found = json.loads((tmp_path / "buffers.json").read_text())
    assert list(found) == list(CASES)
    for case, sizes in found.items():
        assert len(sizes["groups"]) > 3, case
        assert sizes["before"] - sizes["after"] >= 3 * 2 * 199 << 20, (case, sizes)
