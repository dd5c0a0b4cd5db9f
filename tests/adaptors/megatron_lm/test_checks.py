"""Runs the files of ``checks`` in a process of their own, where ``megatron`` is the checkout.

In this process it is megatron-core, which other tests import under the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import bytecode, stock_lm, warm
from tests.support.simulated import run_simulated, unavailable
from tests.support.tiny import ROOT

CHECKS = Path(__file__).parent / "checks"
PYTEST = [
    *[sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
    *["-o", "python_files=check_*.py", "-o", "python_functions=check_*"],
]


def on_cpu(file: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [*PYTEST, str(file)],
        cwd=ROOT,
        env=stock_lm.environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def on_npu(file: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    if unavailable():
        pytest.skip(unavailable())
    return run_simulated(*PYTEST, str(file), modules=warm.NPU, **bytecode.elsewhere(), **environment)


@pytest.mark.parametrize("run", [on_cpu, on_npu])
@pytest.mark.parametrize("file", sorted(path.name for path in CHECKS.glob("check_*.py")))
def test_in_a_process_of_its_own(checkout, data, file, run):
    path = os.pathsep.join([str(checkout), str(ROOT)])
    result = run(CHECKS / file, CHECK_DATA=str(data), PYTHONPATH=path)
    assert result.returncode == 0, result.stdout[-8000:]
    print(result.stdout.splitlines()[-1])
