"""Runs ``checks`` in one process where ``megatron`` is Megatron-DeepSpeed, on each device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.adaptors.megatron_lm.test_checks import on_cpu, on_npu
from tests.support.tiny import ROOT

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("run", [on_cpu, on_npu])
def test_in_a_process_of_its_own(checkout, data, run):
    path = os.pathsep.join([str(checkout), str(ROOT)])
    result = run(Path(__file__).parent / "checks", CHECK_DATA=str(data), PYTHONPATH=path)
    assert result.returncode == 0, result.stdout[-8000:]
    print(result.stdout.splitlines()[-1])
