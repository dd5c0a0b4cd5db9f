"""Plans for CUDA against plans for NPUs, by the real command; `benchmarks.plan_devices` has more layouts."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import plan_devices

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def test_the_replay_of_cuda_is_within_two_per_cent_of_the_npu() -> None:
    pytest.importorskip("megatron.core")
    sizes = plan_devices.SIZES.replace("--num-layers 8", "--num-layers 2")
    row = plan_devices.compared(*plan_devices.LAYOUTS["llama-recompute"], sizes)
    assert row["held"]["cuBLAS"] == [0, 64 << 20]
    assert row["npu"] > 3 << 29
    assert abs(row["rest_differ"]) <= plan_devices.MOST, row
