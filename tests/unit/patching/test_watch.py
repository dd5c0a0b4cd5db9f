"""``watch``: upstream's own runs, its pin is compared."""

from __future__ import annotations

import pytest

from megatron_npu.patching.pins import Pins
from megatron_npu.patching.sources import SourceTree
from megatron_npu.patching.verdicts import compare
from tests.unit.patching.conftest import UpstreamTree

GELU = "stockpkg.model:gelu"


@pytest.fixture
def watching(upstream: UpstreamTree) -> UpstreamTree:
    """The upstream with ``gelu`` watched."""
    upstream.registry.watch(GELU, why="it works on a CPU", upstream="upstream")
    return upstream


def pin(upstream: UpstreamTree) -> Pins:
    pinned, missing = SourceTree(upstream.root).pin(upstream.registry.patches, "upstream", "1.0")
    assert not missing
    return Pins("upstream", [pinned])


def verdict(upstream: UpstreamTree, pins: Pins) -> tuple[str, bool]:
    """Return what ``check`` says of the watched function: (status, whether it fails)."""
    (patch,) = upstream.registry.patches
    found = compare(patch, SourceTree(upstream.root).find(patch.module), pins)
    assert found.kind == "watch"
    return found.status, found.fails


def edit(upstream: UpstreamTree, old: str, new: str) -> None:
    path = upstream.root / "stockpkg/model.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_nothing_is_changed_and_the_ledger_says_why(watching: UpstreamTree) -> None:
    engine = watching.engine()
    model = watching.load("model")
    assert not hasattr(model.gelu, "__wrapped__")
    assert model.gelu(1) == 2
    (row,) = engine.ledger.rows
    assert (row.kind, row.state, row.reason, row.why) == (
        "watch",
        "skipped",
        "upstream's own code works here",
        "it works on a CPU",
    )
    text = engine.ledger.text()
    assert "skipped  watch    stockpkg.model:gelu" in text
    assert "it works on a CPU" in text


def test_a_patch_for_another_device_may_stand_with_it(watching: UpstreamTree) -> None:
    watching.registry.replace(GELU, why="w", devices=("npu",))(lambda x: "new")
    engine = watching.engine(device="npu")
    assert watching.load("model").gelu(1) == "new"
    assert [row.state for row in engine.ledger.rows] == ["skipped", "applied"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("LIMIT = 3", "LIMIT = 4", ("same", False)),
        ("return x + bias", "return bias + x", ("body_changed", False)),
        ("gelu(x, bias=1)", "gelu(x, bias=1, exact=False)", ("signature_changed", True)),
        ("def gelu(", "def gelu_renamed(", ("gone", True)),
    ],
)
def test_its_pin_is_compared_by_check(
    watching: UpstreamTree, old: str, new: str, expected: tuple[str, bool]
) -> None:
    pins = pin(watching)
    edit(watching, old, new)
    assert verdict(watching, pins) == expected


def test_drift_of_it_stops_no_import(watching: UpstreamTree) -> None:
    """Nothing is applied, so nothing can be wrong; it is for ``check`` to tell."""
    pins = pin(watching)
    edit(watching, "gelu(x, bias=1)", "gelu(x, bias=1, exact=False)")
    engine = watching.engine(pins=pins)
    assert watching.load("model").gelu(1) == 2
    assert engine.ledger.rows[0].state == "skipped"
