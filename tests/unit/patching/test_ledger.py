"""The ledger as text, JSON and Markdown."""

from __future__ import annotations

import json

from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.patch import NotAsked
from megatron_npu.patching.registry import Registry
from tests.unit.patching.conftest import UpstreamTree


def test_a_module_that_was_never_imported_is_pending(upstream: UpstreamTree) -> None:
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="w", upstream="upstream")
    upstream.registry.constant("stockpkg.never:X", 7, why="w")
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="w", upstream="another upstream")
    engine = upstream.engine()
    assert engine.ledger.summary() == "0 applied, 0 drifted, 0 skipped, 3 pending"
    upstream.load("model")
    assert engine.ledger.summary() == "1 applied, 0 drifted, 0 skipped, 1 pending"
    assert [row.state for row in engine.ledger.rows] == ["applied", "pending"]


def test_patches_of_other_versions_are_not_told(upstream: UpstreamTree) -> None:
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="w", versions="<2")
    upstream.registry.constant("stockpkg.model:LIMIT", 8, why="w", versions=">=2")
    upstream.registry.constant("stockpkg.model:gelu", None, why="w", devices=("npu",))
    engine = upstream.engine(version="2.1")
    assert upstream.load("model").LIMIT == 8
    assert engine.ledger.summary() == "1 applied, 0 drifted, 1 skipped (for npu, not cpu)"
    assert [row.target for row in engine.ledger.rows] == ["stockpkg.model:LIMIT", "stockpkg.model:gelu"]


def test_forms(upstream: UpstreamTree) -> None:
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="a | b", until="later")
    engine = upstream.engine()
    upstream.load("model")
    engine.ledger.fallbacks = {("attention", "window on cpu"): 3}
    data = json.loads(engine.ledger.json())
    assert data["counts"]["applied"] == 1
    assert data["patches"][0]["target"] == "stockpkg.model:LIMIT"
    assert data["fallbacks"] == [{"operation": "attention", "reason": "window on cpu", "count": 3}]
    table = engine.ledger.markdown().splitlines()
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    text = engine.ledger.text()
    assert "stockpkg.model:LIMIT" in text
    assert "window on cpu" in text
    assert text.endswith(engine.ledger.summary())


def test_what_it_is_about_is_in_text_and_json(upstream: UpstreamTree) -> None:
    engine = upstream.engine()
    engine.ledger.about = {"device": "a machine of cardboard", "cardboard": True}
    assert engine.ledger.text().splitlines()[0] == "device a machine of cardboard"
    told = json.loads(engine.ledger.json())
    assert (told["device"], told["cardboard"]) == ("a machine of cardboard", True)


def test_the_summary_names_each_operation_that_fell_back_once() -> None:
    ledger = Ledger()
    assert "fallbacks" not in ledger.summary()
    ledger.fallbacks = {("norm", "fp64"): 2, ("norm", "cpu"): 1, ("softmax", "width 31"): 4}
    assert ledger.summary().endswith("fallbacks: norm, softmax")


def test_what_failed_comes_first_and_what_is_pending_is_counted() -> None:
    registry, ledger = Registry(), Ledger()
    for name in ("a", "b", "c", "d", "e"):
        registry.constant(f"m:{name}", 1, why="w")
    (ours,) = {patch.ours for patch in registry.patches}
    assert ours.startswith("tests/unit/patching/test_ledger.py:")
    rows = [ledger.row(patch) for patch in registry.patches]
    rows[1].settle("applied")
    rows[2].settle("failed", "the signature changed (m.py:3)")
    for row in rows[3:]:
        row.reason = "not imported: m:c has drifted"
    assert ledger.text().splitlines() == [
        "failed   constant m:c",
        f"{'':18}{ours}",
        f"{'':18}the signature changed (m.py:3)",
        f"{'':18}w",
        "applied  constant m:b",
        f"{'':18}{ours}",
        f"{'':18}w",
        "pending  2 patches",
        f"{'':18}not imported: m:c has drifted",
        "pending  1 patch",
        f"{'':18}their modules have not been fully imported",
        "1 applied, 0 drifted, 0 skipped, 1 failed (m:c), 3 pending",
    ]
    assert ledger.text(pending=True).count("pending  constant") == 3


def test_equal_reasons_are_told_once() -> None:
    registry, ledger = Registry(), Ledger()
    for name in "abc":
        registry.constant(f"m:{name}", 1, why="w")
        ledger.row(registry.patches[-1]).settle("skipped", "apex is here" if name < "c" else "")
    assert ledger.summary() == "0 applied, 0 drifted, 3 skipped (apex is here)"


def test_a_patch_for_a_setting_that_is_off_is_no_news(upstream: UpstreamTree) -> None:
    off = NotAsked("SWITCH=1 asks for it")
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="w", condition=lambda: off)
    engine = upstream.engine()
    assert upstream.load("model").LIMIT != 7
    (row,) = engine.ledger.rows
    assert (row.state, row.reason) == ("off", "SWITCH=1 asks for it")
    assert engine.ledger.summary() == "0 applied, 0 drifted, 0 skipped"
    assert engine.ledger.text().startswith("off      constant stockpkg.model:LIMIT")


def test_every_form_says_until_when_and_that_it_is_a_bug_of_upstream() -> None:
    registry, ledger = Registry(), Ledger()
    registry.constant("m:a", 1, why="w", until="the issue 7 is closed", upstream_bug=True)
    registry.constant("m:b", 1, why="w", until="0.17")
    registry.constant("m:c", 1, why="w")
    ledger.keep(registry.patches)
    text = ledger.text(pending=True)
    assert "until the issue 7 is closed (upstream bug)\n" in text
    assert "until 0.17\n" in text
    assert text.count("until") == 2
    untils = [line.split("|")[-2].strip() for line in ledger.markdown().splitlines()[2:]]
    assert untils == ["the issue 7 is closed (upstream bug)", "0.17", ""]
    told = [(row["until"], row["upstream_bug"]) for row in json.loads(ledger.json())["patches"]]
    assert told == [("the issue 7 is closed", True), ("0.17", False), ("", False)]
