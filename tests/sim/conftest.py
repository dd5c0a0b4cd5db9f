"""Tests that run on simulated NPUs: one process under ``megatron-npu sim`` per file, reported test by test.

A test marked ``simulated`` is executed by pytest inside that process; outside it only takes over the
outcome. Such a file must not import torch_npu at module level: outside the simulator it is not there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.support import warm
from tests.support.simulated import inside, run_simulated, simulated, unavailable  # noqa: F401

OUTCOMES = "SIMULATED_TEST_OUTCOMES"  # inside: the file to which the outcomes are written


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simulated: executed on simulated NPUs, in one process per file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Inside: note the outcome for the process outside; a failure in set-up or tear-down counts too."""
    path = os.environ.get(OUTCOMES)
    if not path or (report.when != "call" and report.outcome == "passed"):
        return
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext
    with Path(path).open("a", encoding="utf-8") as file:
        row = [report.nodeid, report.outcome, text + report.capstdout[-2000:], report.duration]
        print(json.dumps(row), file=file)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Outside: run the whole file inside at its first test, then answer each test from the outcomes."""
    if inside() or item.get_closest_marker("simulated") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    outcome, text, duration = "skipped", unavailable(), 0.0
    if text is None:
        outcome, text, duration = _outcome(item)
    longrepr = (str(item.path), None, text) if outcome == "skipped" else text or None
    report = pytest.TestReport(
        item.nodeid,
        item.location,
        dict.fromkeys(item.keywords, 1),
        outcome,
        longrepr,
        "call",
        duration=duration,
    )
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # the test before this one has left the folders set up that it shares with this one
    item.session._setupstate.teardown_exact(nextitem)
    return True


_OUTCOMES = pytest.StashKey[dict]()
_TAIL = 4000  # characters of the inner run's output that are shown if it ended early


def _outcome(item: pytest.Item) -> tuple[str, str, float]:
    """Return (outcome, text, seconds) of one test; the first of a file waits for all of them."""
    files = item.config.stash.setdefault(_OUTCOMES, {})
    if item.path not in files:
        files[item.path] = _run_file(item)
    rows, output = files[item.path]
    lost = ("failed", f"the simulated process ended before this test:\n{output}", 0.0)
    return rows.get(item.nodeid, lost)


def _run_file(item: pytest.Item) -> tuple[dict[str, tuple[str, str, float]], str]:
    """Run the selected simulated tests of the item's file; return nodeid -> outcome, and the output's end."""
    selected = [
        other.nodeid
        for other in item.session.items
        if other.path == item.path and other.get_closest_marker("simulated") is not None
    ]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "outcomes.jsonl"
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        outcomes = {OUTCOMES: str(report)}
        done = run_simulated(*pytest_command, *selected, timeout=LONGEST, modules=warm.NPU, **outcomes)
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    rows = {name: (outcome, text, seconds) for name, outcome, text, seconds in map(json.loads, lines)}
    return rows, done.stdout[-_TAIL:]
