"""The ledger as text, JSON and Markdown."""

from __future__ import annotations

import json

from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.record import Registry
from tests.unit.patching.conftest import HostTree


def test_a_module_that_was_never_imported_is_pending(host: HostTree) -> None:
    host.registry.constant("hostpkg.model:LIMIT", 7, why="w", host="host")
    host.registry.constant("hostpkg.never:X", 7, why="w")
    host.registry.constant("hostpkg.model:LIMIT", 7, why="w", host="another host")
    engine = host.engine()
    assert engine.ledger.summary() == "0 applied, 0 drifted, 0 skipped, 3 pending"
    host.load("model")
    assert engine.ledger.summary() == "1 applied, 0 drifted, 0 skipped, 1 pending"
    assert [row.state for row in engine.ledger.rows] == ["applied", "pending"]


def test_patches_of_other_versions_are_not_told(host: HostTree) -> None:
    host.registry.constant("hostpkg.model:LIMIT", 7, why="w", versions="<2")
    host.registry.constant("hostpkg.model:LIMIT", 8, why="w", versions=">=2")
    host.registry.constant("hostpkg.model:gelu", None, why="w", devices=("npu",))
    engine = host.engine(version="2.1")
    assert host.load("model").LIMIT == 8
    assert engine.ledger.summary() == "1 applied, 0 drifted, 1 skipped (for npu, not cpu)"
    assert [row.target for row in engine.ledger.rows] == ["hostpkg.model:LIMIT", "hostpkg.model:gelu"]


def test_forms(host: HostTree) -> None:
    host.registry.constant("hostpkg.model:LIMIT", 7, why="a | b", until="later")
    engine = host.engine()
    host.load("model")
    engine.ledger.refusals = {("attention", "window on cpu"): 3}
    data = json.loads(engine.ledger.json())
    assert data["counts"]["applied"] == 1
    assert data["patches"][0]["target"] == "hostpkg.model:LIMIT"
    assert data["refusals"] == [{"operation": "attention", "reason": "window on cpu", "count": 3}]
    table = engine.ledger.markdown().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    text = engine.ledger.text()
    assert "hostpkg.model:LIMIT" in text
    assert "window on cpu" in text
    assert text.endswith(engine.ledger.summary())


def test_the_summary_names_each_operation_that_ran_unfused_once() -> None:
    ledger = Ledger()
    assert "unfused" not in ledger.summary()
    ledger.refusals = {("norm", "fp64"): 2, ("norm", "cpu"): 1, ("softmax", "width 31"): 4}
    assert ledger.summary().endswith("unfused: norm, softmax")


def test_equal_reasons_are_told_once() -> None:
    registry, ledger = Registry(), Ledger()
    for name in "abc":
        registry.constant(f"m:{name}", 1, why="w")
        ledger.row(registry.patches[-1]).settle("skipped", "apex is here" if name < "c" else "")
    assert ledger.summary() == "0 applied, 0 drifted, 3 skipped (apex is here)"
