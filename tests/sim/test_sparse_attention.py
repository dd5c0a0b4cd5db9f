"""Sparse attention of megatron-core 0.19 on a simulated NPU: less launches and memory, the same losses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import ROOT

HERE = Path(__file__).resolve().parent
VERSION = ROOT / "checkouts" / "megatron_core-0.19.2"


def test_the_same_losses_with_less(simulated):
    if not VERSION.is_dir():
        pytest.skip(f"no {VERSION.relative_to(ROOT)}: run scripts/get_megatron.sh")
    done = simulated(
        "python",
        str(HERE / "sparse_attention_worker.py"),
        PYTHONPATH=os.pathsep.join([str(VERSION), str(ROOT)]),
        MEGATRON_LM_PATH=str(VERSION),
        MEGATRON_NPU_TE="local",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    fused, unfused = found["fused"], found["unfused"]
    print(found)
    assert found["reported"] == []
    assert fused["losses"] == pytest.approx(unfused["losses"], rel=2e-3)  # bf16
    assert fused["losses"][-1] < fused["losses"][0] - 0.05
    assert (fused["calls"], unfused["calls"]) == ([2, 2], [0, 0])  # two layers, forward and backward
    assert fused["launches"] < 0.9 * unfused["launches"]
    assert fused["peak"] < 0.8 * unfused["peak"]
