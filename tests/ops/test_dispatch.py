"""Binding, fallbacks and strict mode."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch

from megatron_npu.ops import dispatch
from megatron_npu.ops.dispatch import FallbackForbiddenError, Operation
from tests.conftest import ROOT
from tests.support import warm


@pytest.fixture
def operation(monkeypatch):
    """Doubles on a device that takes small numbers only; the reference says what it does."""
    monkeypatch.setattr(dispatch, "OPERATIONS", [])
    monkeypatch.setattr(dispatch, "fallbacks", {})
    made = Operation("double", lambda x: ("reference", 2 * x))
    made.on("device", supports=lambda x: f"{x} is too large" if x > 9 else None)(lambda x: ("fused", x + x))
    made.bind("device")
    return made


def test_the_implementation_runs_where_it_can(operation):
    assert operation(3) == ("fused", 6)


def test_a_refused_call_runs_on_the_reference_and_says_why_once(operation, caplog):
    caplog.set_level(logging.WARNING)
    assert [operation(10), operation(10)] == [("reference", 20)] * 2
    assert dispatch.fallbacks == {("double", "10 is too large"): 2}
    assert [record.getMessage() for record in caplog.records] == ["double falls back: 10 is too large"]


def test_strict_mode_makes_a_fallback_an_error(operation, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FallbackForbiddenError, match="double falls back: 10 is too large") as refused:
        operation(10)
    assert str(refused.value).endswith("forbids fallbacks. Unset MEGATRON_NPU_STRICT.")
    assert operation(3) == ("fused", 6)


def test_a_report_says_what_happens_and_strict_mode_what_to_ask_for(operation, monkeypatch, caplog):
    report = ("ring", "there is a window", "gathers", "Ask for gathering.")
    dispatch.report_fallback(*report)
    assert caplog.messages == ["ring gathers: there is a window"]
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FallbackForbiddenError, match="ring gathers: there is a window") as refused:
        dispatch.report_fallback(*report)
    assert str(refused.value).endswith(" Ask for gathering, or unset MEGATRON_NPU_STRICT.")


def test_strict_mode_ends_a_command_in_one_line(tmp_path):
    """A script under ``megatron-npu run``, as any command: no traceback, exit code 2."""
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron_npu.ops.dispatch import report_fallback\nreport_fallback('norm', 'fp64')\n"
    )
    done = warm.run(
        [sys.executable, "-m", "megatron_npu", "run", str(script)],
        env={**os.environ, "MEGATRON_NPU_STRICT": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "megatron-npu run: error: norm falls back: fp64. MEGATRON_NPU_STRICT=1 forbids fallbacks. "
    )
    assert line.endswith("Unset MEGATRON_NPU_STRICT.")


def test_a_device_without_implementation_is_a_fallback(operation):
    operation.bind("elsewhere")
    assert operation(3) == ("reference", 6)
    assert dispatch.fallbacks == {("double", "there is no implementation for elsewhere"): 1}


def test_nothing_stands_between_when_nothing_is_asked_for(operation):
    def implementation(x):
        return x

    operation.on("plain")(implementation)
    operation.bind("plain")
    assert operation._bound is implementation


@pytest.fixture
def planned(operation):
    """Doubles in as many steps as were planned; counts the plans."""
    plans = []

    def plan(x):
        plans.append(x)
        return dispatch.Unsupported(f"{x} is too large") if x > 9 else f"{x} steps"

    operation.on("planning", plan=plan)(lambda x, plan: (plan, x + x))
    operation.plans = plans
    return operation


def test_what_is_planned_once_is_handed_to_the_implementation(planned):
    planned.bind("planning")
    assert planned(3) == ("3 steps", 6)
    assert planned.plans == [3]


def test_an_unsupported_call_falls_back_on_the_reference(planned, monkeypatch):
    planned.bind("planning")
    assert planned(10) == ("reference", 20)
    assert dispatch.fallbacks == {("double", "10 is too large"): 1}
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FallbackForbiddenError, match="10 is too large"):
        planned(10)


def test_a_planned_call_is_verified_like_any_other(monkeypatch):
    monkeypatch.setattr(dispatch, "OPERATIONS", [])
    monkeypatch.setattr(dispatch.verify, "findings", {})
    monkeypatch.setattr(dispatch.verify, "watches", lambda name, group: True)
    made = dispatch.Operation("double", lambda x: 2 * x)
    made.on("device", plan=lambda x: 0.5)(lambda x, plan: 2 * x + plan)
    made.bind("device")
    assert torch.equal(made(torch.ones(2)), torch.full((2,), 2.5))
    ((operation, _, what), finding) = dispatch.verify.findings.popitem()
    assert (operation, what, finding.largest) == ("double", "output", 0.25)
