"""What a rank holds under ZeRO, of two simulated NPUs."""

from __future__ import annotations

import json
import sys

import pytest

from tests.conftest import LONGEST
from tests.support import bytecode
from tests.support.simulated import run_simulated, unavailable
from tests.support.tiny import ROOT

pytest.importorskip("deepspeed")

SCHEMES = ("zero-1", "zero-2", "zero-3", "zero-1, cpu offload")


def test_zero_holds_what_arithmetic_says(checkout, tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    command = [str(ROOT / "benchmarks" / "deepspeed_memory.py"), "--ranks", "2", "--schemes", *SCHEMES]
    output = tmp_path / "rows.json"
    settings = {"MEGATRON_NPU_SIM_DEVICES": "2", "MEGATRON_LM_PATH": str(checkout)}
    command = [sys.executable, *command, "--output", str(output)]
    done = run_simulated(*command, timeout=LONGEST, **settings, **bytecode.elsewhere())
    assert done.returncode == 0, done.stdout[-4000:]
    rows = json.loads(output.read_text())["2"]
    for scheme in SCHEMES:
        assert rows[scheme]["ratio"] == pytest.approx(
            {"between_steps": 1, "between_micro_batches": 1}, abs=0.1
        )
