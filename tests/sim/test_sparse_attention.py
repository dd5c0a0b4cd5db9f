"""Sparse attention on a simulated NPU: the same losses at less cost; before 0.19 it says why not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

HERE = Path(__file__).resolve().parent
VERSION, BEFORE = (ROOT / "checkouts" / f"megatron_core-{version}" for version in ("0.19.2", "0.18.2"))


def train(simulated, version: Path) -> dict[str, Any]:
    """Return what the worker prints."""
    if not version.is_dir():
        pytest.skip(f"no {version.relative_to(ROOT)}: run scripts/get_megatron.sh")
    done = simulated(
        "python",
        str(HERE / "sparse_attention_worker.py"),
        PYTHONPATH=os.pathsep.join([str(version), str(ROOT)]),
        MEGATRON_LM_PATH=str(version),
        MEGATRON_NPU_TE="local",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert [state for state, _ in found["indexer"]] == ["skipped"]
    assert "documents neither the formula" in found["indexer"][0][1]
    return found


def test_the_same_losses_with_less(simulated):
    found = train(simulated, VERSION)
    fused, unfused = found["fused"], found["unfused"]
    assert found["reported"] == []
    assert fused["losses"] == pytest.approx(unfused["losses"], rel=2e-3)  # bf16
    assert fused["losses"][-1] < fused["losses"][0] - 0.05
    assert (fused["calls"], unfused["calls"]) == ([2, 2], [0, 0])  # two layers, forward and backward
    launches, peaks = ([way[name] for way in (unfused, fused)] for name in ("launches", "peak"))
    before, after = (f"{peak / 2**20:.1f}" for peak in peaks)
    page = (ROOT / "docs" / "records" / "compared-with-mindspeed.md").read_text(encoding="utf-8")
    counted = (
        f"{launches[0]} launches and {before} MiB without the operation, and {launches[1]} launches and "
        f"{after} MiB"
    )
    assert counted in " ".join(page.split())
    assert launches[1] < 0.9 * launches[0]
    assert peaks[1] < 0.8 * peaks[0]


def test_keys_of_every_head_are_left_to_megatron_and_reported(simulated):
    found = train(simulated, BEFORE)
    assert len(found["reported"]) == 1
    assert "supports one latent key for all heads" in found["reported"][0]
    assert found["unfused"]["losses"][-1] < found["unfused"]["losses"][0] - 0.05
