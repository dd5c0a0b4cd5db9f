"""Binding, refusals and strict mode."""

from __future__ import annotations

import logging

import pytest

from megatron_npu.ops import dispatch
from megatron_npu.ops.dispatch import FusedPathRefusedError, Operation


@pytest.fixture
def operation(monkeypatch):
    """Doubles on a device that takes small numbers only; the reference says what it does."""
    monkeypatch.setattr(dispatch, "OPERATIONS", [])
    monkeypatch.setattr(dispatch, "refusals", {})
    made = Operation("double", lambda x: ("reference", 2 * x))
    made.on("device", supports=lambda x: f"{x} is too large" if x > 9 else None)(lambda x: ("fused", x + x))
    made.bind("device")
    return made


def test_the_implementation_runs_where_it_can(operation):
    assert operation(3) == ("fused", 6)


def test_a_refused_call_runs_on_the_reference_and_says_why_once(operation, caplog):
    caplog.set_level(logging.WARNING)
    assert [operation(10), operation(10)] == [("reference", 20)] * 2
    assert dispatch.refusals == {("double", "10 is too large"): 2}
    assert [record.getMessage() for record in caplog.records] == ["double runs unfused: 10 is too large"]


def test_strict_mode_makes_a_refusal_an_error(operation, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FusedPathRefusedError, match="double leaves its fused path: 10 is too large"):
        operation(10)
    assert operation(3) == ("fused", 6)


def test_a_device_without_implementation_is_a_refusal(operation):
    operation.bind("elsewhere")
    assert operation(3) == ("reference", 6)
    assert dispatch.refusals == {("double", "there is no implementation for elsewhere"): 1}


def test_nothing_stands_between_when_nothing_is_asked_for(operation):
    def implementation(x):
        return x

    operation.on("plain")(implementation)
    operation.bind("plain")
    assert operation._bound is implementation
