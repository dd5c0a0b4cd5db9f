"""Plans for CUDA against plans for NPUs, by the real command; `benchmarks.plan_devices` has more layouts."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import plan_devices

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fake CUDA is compiled")
SMALL = plan_devices.SIZES.replace("--num-layers 8", "--num-layers 2")


def test_the_replay_of_cuda_is_within_two_per_cent_of_the_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    program, devices, words = plan_devices.LAYOUTS["llama-dp2-distributed"]
    row = plan_devices.compared(program, devices, words, SMALL)
    assert row["held"]["cuBLAS"] == [0, 64 << 20]
    assert row["npu"] > 600 << 20
    assert abs(row["rest_differ"]) <= plan_devices.MOST, row
