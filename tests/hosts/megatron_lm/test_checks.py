"""Runs the files of ``checks`` in a process of their own, where ``megatron`` is the checkout.

In this process it is megatron-core, which other tests import under the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.tiny import ROOT
from tests.hosts.megatron_lm import runs

CHECKS = Path(__file__).parent / "checks"


@pytest.mark.parametrize("file", sorted(path.name for path in CHECKS.glob("check_*.py")))
def test_in_a_process_of_its_own(checkout, data, file):
    path = os.pathsep.join([str(checkout), str(ROOT)])
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "python_files=check_*.py",
        "-o",
        "python_functions=check_*",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(CHECKS / file)],
        cwd=ROOT,
        env={**runs.environment(CHECK_DATA=str(data)), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-3000:]
    print(result.stdout.splitlines()[-1])
