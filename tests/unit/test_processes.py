"""What tests start has a time limit: that of ``tests/support/processes.py``, or one beside the call."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import processes

WAIT = {"run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
FILES = sorted((ROOT / "tests").rglob("*.py"))


def endless(source: str) -> list[int]:
    """Return the lines of ``source`` that wait for a process without saying for how long."""
    tree = ast.parse(source)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "subprocess":
            lines += [node.lineno for each in node.names if each.name in WAIT]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAIT:
            of_subprocess = isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess"
            if of_subprocess and "timeout" not in {keyword.arg for keyword in node.keywords}:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("subprocess.run(['true'], check=True)", [1]),
        ("subprocess.run(['true'], timeout=9)", []),
        ("\nsubprocess.check_output(['true'])", [2]),
        ("from subprocess import run", [1]),
        ("from subprocess import PIPE, Popen", []),
        ("processes.run(['true'])", []),
    ],
)
def test_what_waits_for_ever_is_found(source: str, found: list[int]) -> None:
    assert endless(source) == found


def test_no_test_waits_for_ever() -> None:
    found = {str(path.relative_to(ROOT)): endless(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(found) > 400


def test_the_standard_library_s_own_is_left_alone() -> None:
    assert subprocess.run.__module__ == "subprocess"
    assert Path(subprocess.run.__code__.co_filename).name == "subprocess.py"


def test_a_process_is_killed_at_its_limit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run(command, timeout=0.5)
    with pytest.raises(subprocess.CalledProcessError):
        processes.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)
    assert processes.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
