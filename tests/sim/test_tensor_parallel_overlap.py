"""--tp-comm-overlap: layers whose products communicate, beside layers that wait for their collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.ops.products.parallel_linear import RANKS
from tests.support import warm

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("ranks", RANKS)
def test_the_same_bits_with_fewer_launches(simulated, ranks):
    done = simulated(
        "python",
        str(HERE / "ranks.py"),
        "--torch",
        str(ranks),
        str(HERE / "overlap_worker.py"),
        modules=warm.DRIVER,
        MEGATRON_NPU_SIM_HCCL_TIMEOUT="60",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert all(f"rank {rank}: done" in done.stdout for rank in range(ranks)), done.stdout[-6000:]
