"""--tp-comm-overlap: layers whose products communicate, beside layers that wait for their collective."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_the_same_bits_with_fewer_launches(simulated):
    done = simulated(
        "python",
        str(HERE / "ranks.py"),
        "--torch",
        "2",
        str(HERE / "overlap_worker.py"),
        MEGATRON_NPU_SIM_DEVICES="2",
        MEGATRON_NPU_SIM_HCCL_TIMEOUT="60",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert [f"rank {rank}: done" in done.stdout for rank in range(2)] == [True, True], done.stdout[-6000:]
