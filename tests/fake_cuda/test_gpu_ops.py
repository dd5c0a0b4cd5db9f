"""benchmarks/gpu_ops.py on fake CUDA: each variant that is installed runs, forward and backward."""

from __future__ import annotations

import json
import os
import sys

import pytest

from megatron_npu.planning.fake_cuda import library
from tests.conftest import ROOT
from tests.support import processes

PROGRAM = """
from megatron_npu.planning.fake_cuda import library
library.load()
from megatron_npu import plugin
from megatron_npu.planning.fake_cuda import machine
with machine.installed(), machine.running():
    plugin.install()
    import gpu_ops
    gpu_ops.main()
"""


def test_each_variant_that_is_there_runs(tmp_path) -> None:
    if library.unavailable():
        pytest.skip(library.unavailable())
    output = tmp_path / "operations.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    env = {**os.environ, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    words = ["--tiny", "--repeat", "1", "--output", str(output)]
    done = processes.run(
        [sys.executable, "-c", PROGRAM, *words], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found["device"] == "fake"
    refused = {row["variant"]: row["refused"] for row in found["rows"] if "refused" in row}
    assert all(why.startswith("ModuleNotFoundError") for why in refused.values()), refused
    measured = {
        row["operation"] for row in found["rows"] if row["variant"] == "project" and "refused" not in row
    }
    assert {"attention 32", "attention 32 window 8", "rms_norm", "linear_cross_entropy", "adam"} <= measured
