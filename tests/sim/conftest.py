"""Tests that run on simulated NPUs: one process under ``megatron-npu sim`` per file, reported test by test.

A test marked ``simulated`` is executed by pytest inside that process; outside it only takes over the
outcome. Such a file must not import torch_npu at module level: outside the simulator it is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu import settings
from megatron_npu.errors import UsageError
from megatron_npu.sim import site

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = "SIMULATED_TEST_OUTCOMES"  # inside: the file to which the outcomes are written
Run = Callable[..., subprocess.CompletedProcess]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simulated: executed on simulated NPUs, in one process per file")


def inside() -> bool:
    """Return whether this process has simulated NPUs."""
    return settings.SIM.enabled()


def run_simulated(*command: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Run ``megatron-npu sim -- command`` and return what it did; both outputs as one text in ``stdout``."""
    # The CPU-only settings of the surrounding run must not follow into a process that has NPUs.
    inherited = {name: value for name, value in os.environ.items() if name != settings.DEVICE.name}
    return subprocess.run(
        [sys.executable, "-m", "megatron_npu", "sim", "--", *command],
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="session")
def simulated() -> Run:
    """Return ``run_simulated``; skip where the simulator cannot be prepared through no fault of its own."""
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler: the simulated Ascend cannot be built")
    try:
        site.prepare()
    except UsageError as error:
        pytest.skip(f"no torch_npu wheel for the simulated Ascend: {error}")
    return run_simulated


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Inside: note the outcome for the process outside."""
    path = os.environ.get(OUTCOMES)
    if not path or (report.when != "call" and report.outcome == "passed"):
        return
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
    with Path(path).open("a", encoding="utf-8") as file:
        print(json.dumps([report.nodeid, report.outcome, text + report.capstdout[-2000:]]), file=file)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Outside: run the whole file inside at its first test, then answer each test from the outcomes."""
    if inside() or pyfuncitem.get_closest_marker("simulated") is None:
        return None
    run = pyfuncitem._request.getfixturevalue("simulated")
    outcomes = _outcomes(run, pyfuncitem)
    outcome, text = outcomes.get(pyfuncitem.nodeid, ("failed", f"the process ended first\n{outcomes['']}"))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


_KEY = pytest.StashKey[dict]()


def _outcomes(run: Run, item: pytest.Function) -> dict[str, tuple[str, str]]:
    """Return nodeid -> (outcome, text) for the selected simulated tests of the item's file; "" -> its output."""
    known = item.config.stash.setdefault(_KEY, {})
    if item.path not in known:
        selected = [
            other.nodeid
            for other in item.session.items
            if other.path == item.path and other.get_closest_marker("simulated") is not None
        ]
        report = item.config.rootpath / ".pytest_cache" / f"simulated-{os.getpid()}-{item.path.stem}.jsonl"
        report.parent.mkdir(exist_ok=True)
        report.unlink(missing_ok=True)
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = run(*pytest_command, *selected, **{OUTCOMES: str(report)}, timeout=600)
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
        report.unlink(missing_ok=True)
        known[item.path] = {name: (outcome, text) for name, outcome, text in map(json.loads, lines)}
        known[item.path][""] = done.stdout[-4000:]
    return known[item.path]
