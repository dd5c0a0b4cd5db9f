"""Runs the files of ``checks`` in a process where ``megatron`` is Megatron-DeepSpeed, on each device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adaptors.megatron_lm.test_checks import on_cpu, on_npu
from tests.end_to_end.tiny import ROOT

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("run", [on_cpu, on_npu])
def test_layers(checkout, data, run):
    path = os.pathsep.join([str(checkout), str(ROOT)])
    file = Path(__file__).parent / "checks" / "check_layers.py"
    result = run(file, CHECK_DATA=str(data), PYTHONPATH=path)
    assert result.returncode == 0, result.stdout[-8000:]
    print(result.stdout.splitlines()[-1])
