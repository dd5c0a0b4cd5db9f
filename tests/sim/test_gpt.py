"""A megatron-core GPT with the plug-in, on one simulated NPU and on the CPU: the same loss curve."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.simulated import ROOT

WORKER = Path(__file__).parent / "gpt_worker.py"


def last_json(text: str) -> dict:
    """Return the worker's line among what the libraries print."""
    lines = [line for line in text.splitlines() if line.startswith('{"device"')]
    assert lines, text
    return json.loads(lines[-1])


def on_cpu(*arguments: str) -> dict:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MEGATRON_NPU_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(WORKER), *arguments]
    result = warm.run(command, env=environment, modules=warm.DRIVER, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return last_json(result.stdout)


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_loss_and_gradient_norm_equal_the_cpu(simulated, tmp_path, dtype, limit):
    pytest.importorskip("megatron.core")
    result = simulated(
        sys.executable,
        *(str(WORKER), dtype),
        modules=warm.DRIVER,
        MEGATRON_NPU_DEVICE="npu",
        MEGATRON_NPU_SIM_REPORT=str(tmp_path / "report.json"),
    )
    assert result.returncode == 0, result.stdout
    found, expected = last_json(result.stdout), on_cpu(dtype)
    assert (found["device"], expected["device"]) == ("npu:0", "cpu")
    assert found["losses"] == pytest.approx(expected["losses"], rel=limit)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * limit)
    assert found["losses"][-1] < found["losses"][0]
    assert found["applied"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["without_body"] == {}
    attention = {name for name in report["launches"] if "npu_fusion_attention" in name}
    assert {report["launches"][name]["calls"] for name in attention} == {2 * 5}, "2 layers, 5 steps"
