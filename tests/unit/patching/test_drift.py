"""What the engine does when upstream is not what a patch was written against."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from megatron_npu.patching.module_patch import DriftError, PatchError
from megatron_npu.patching.pins import Pins
from megatron_npu.patching.sources import SourceTree
from megatron_npu.patching.verdicts import compare
from tests.unit.patching.conftest import MODEL, UpstreamTree

GELU = "stockpkg.model:gelu"


def new(*args: Any) -> Any:
    return "new"


def factory(old: Any) -> Any:
    return lambda *args: ("wrapped", old(*args))


@pytest.fixture(params=["replace", "wrap"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def pin(upstream: UpstreamTree, kind: str) -> Pins:
    """Record a patch of ``gelu`` and pin it as it is now."""
    getattr(upstream.registry, kind)(GELU, why="w")(new if kind == "replace" else factory)
    pinned, missing = SourceTree(upstream.root).pin(upstream.registry.patches, "upstream", "0.9")
    assert not missing
    return Pins("upstream", [pinned])


def edit(upstream: UpstreamTree, old: str, changed: str) -> None:
    assert old in MODEL
    upstream.write({"stockpkg/model.py": MODEL.replace(old, changed)})


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_same(upstream: UpstreamTree, kind: str, mode: str) -> None:
    pins = pin(upstream, kind)
    edit(upstream, '"""Add."""', '"""Add two numbers."""')
    engine = upstream.engine(pins=pins, drift=mode)
    assert upstream.load("user").gelu(1) in ("new", ("wrapped", 2))
    assert (engine.ledger.rows[0].state, engine.ledger.rows[0].reason) == ("applied", "")


def test_changed_body(upstream: UpstreamTree, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    pins = pin(upstream, kind)
    edit(upstream, "return x + bias", "return bias + x")
    engine = upstream.engine(pins=pins)
    if kind == "replace":
        with pytest.raises(DriftError):
            upstream.load("user")
        assert "stockpkg.model" not in sys.modules
        assert engine.ledger.rows[0].state == "failed"
    else:
        assert upstream.load("user").gelu(1) == ("wrapped", 2)
        assert engine.ledger.rows[0].state == "applied"
        assert "body changed" in engine.ledger.rows[0].reason
        assert len(caplog.records) == 1


def test_changed_signature_is_an_error_with_one_clear_message(upstream: UpstreamTree, kind: str) -> None:
    pins = pin(upstream, kind)
    edit(upstream, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    upstream.engine(pins=pins)
    with pytest.raises(DriftError) as caught:
        upstream.load("user")
    message = str(caught.value)
    for part in (
        GELU,
        "upstream 1.0",
        f"{upstream.root}/stockpkg/model.py:5",
        "megatron-npu check --megatron PATH",
        "MEGATRON_NPU_DRIFT=warn",
        f"; patched in {upstream.registry.patches[0].ours}",
    ):
        assert part in message
    assert "def gelu(x, bias=1)" in message
    assert "exact=False" in message
    with pytest.raises(DriftError):  # and again, not silently unpatched
        upstream.load("user")


def test_changed_signature_is_applied_on_request(
    upstream: UpstreamTree, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    pins = pin(upstream, kind)
    edit(upstream, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    engine = upstream.engine(pins=pins, drift="warn")
    assert upstream.load("user").gelu(1) in ("new", ("wrapped", 2))
    assert engine.ledger.rows[0].state == "drifted"
    assert engine.ledger.summary().startswith("0 applied, 1 drifted (signature changed")
    assert len(caplog.records) == 1
    (record,) = caplog.records
    assert "applied anyway" in record.getMessage()
    assert "MEGATRON_NPU_DRIFT" not in record.getMessage()  # it is set already


def test_gone(upstream: UpstreamTree, kind: str) -> None:
    pins = pin(upstream, kind)
    edit(upstream, "def gelu(", "def gelu_renamed(")
    upstream.write({"stockpkg/user.py": ""})
    upstream.engine(pins=pins)
    with pytest.raises(DriftError, match="the file does not define it"):
        upstream.load("model")
    engine = upstream.engine(pins=pins, drift="warn", arm=False)
    upstream.engines[0].disarm()
    engine.arm()
    assert not hasattr(upstream.load("model"), "gelu")
    assert engine.ledger.rows[0].state == "failed"


def test_without_a_pin(upstream: UpstreamTree, kind: str) -> None:
    pin(upstream, kind)
    engine = upstream.engine(pins=Pins("upstream", []))
    upstream.load("user")
    row = engine.ledger.rows[0]
    assert (row.state, row.reason) == ("applied", "no pin")


def test_defined_on_a_condition_that_is_not_met(upstream: UpstreamTree) -> None:
    upstream.write({"stockpkg/model.py": "if False:\n    def gelu(x):\n        return x\n"})
    pins = pin(upstream, "wrap")
    engine = upstream.engine(pins=pins)
    upstream.load("model")
    assert engine.ledger.rows[0].state == "skipped"
    assert "condition" in engine.ledger.rows[0].reason


def test_drift_in_a_module_imported_before(upstream: UpstreamTree) -> None:
    pins = pin(upstream, "replace")
    edit(upstream, "return x + bias", "return bias + x")
    user = upstream.load("user")
    engine = upstream.engine(pins=pins)
    with pytest.raises(DriftError):
        engine.apply_loaded()
    assert user.gelu(1) == 2
    upstream.write({"stockpkg/later.py": ""})
    with pytest.raises(DriftError):  # whoever swallowed the first one meets it again
        upstream.load("later")


def test_one_message_names_every_drifted_target(upstream: UpstreamTree) -> None:
    upstream.registry.constant("stockpkg.model:LIMIT", 9, why="w")
    pins = pin(upstream, "replace")
    edit(upstream, "LIMIT = 3", "LIMIT = 4")
    upstream.write(
        {
            "stockpkg/model.py": (upstream.root / "stockpkg/model.py")
            .read_text()
            .replace("x + bias", "bias + x")
        }
    )
    upstream.engine(pins=pins)
    with pytest.raises(DriftError, match=r"(?s)model:LIMIT.*model:gelu"):
        upstream.load("model")


def test_a_patch_error_names_its_origin(upstream: UpstreamTree) -> None:
    @upstream.registry.wrap("stockpkg.model:Core.method", why="w")
    def broken(old: Any) -> Any:
        raise KeyError("x")

    upstream.engine()
    with pytest.raises(PatchError, match=r"Core\.method.*broken.*KeyError"):
        upstream.load("model")


def test_an_around_is_judged_by_what_it_takes(
    upstream: UpstreamTree, caplog: pytest.LogCaptureFixture
) -> None:
    """Each for itself, where two of one target take different things."""

    def hands_on(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return "around", original(x, *args, **kwargs)

    def takes_no_more(original: Any, x: Any, bias: Any = 1) -> Any:
        return original(x, bias)

    upstream.registry.around(GELU, why="w", order=1)(hands_on)
    pinned, _ = SourceTree(upstream.root).pin(upstream.registry.patches, "upstream", "0.9")
    edit(upstream, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    pins = Pins("upstream", [pinned])
    source = SourceTree(upstream.root).find("stockpkg.model")
    verdict = compare(upstream.registry.patches[0], source, pins)
    assert (verdict.status, verdict.fits, verdict.fails) == ("signature_changed", True, False)
    assert verdict.detail.startswith(
        "no change that affects our function: signature changed from 'def gelu(x, bia"
    )
    engine = upstream.engine(pins=pins)
    gelu = upstream.load("user").gelu
    assert gelu(1, exact=True) == ("around", 2)
    assert engine.ledger.rows[0].state == "applied"
    assert "no change that affects our function" in engine.ledger.rows[0].reason
    assert len(caplog.records) == 1
    engine.undo()
    upstream.registry.around(GELU, why="v", order=2)(takes_no_more)
    verdicts = [compare(patch, source, pins) for patch in upstream.registry.patches]
    assert [verdict.fails for verdict in verdicts] == [False, True]
    assert "exact is new, and our function does not accept it" in verdicts[1].detail


def test_two_of_one_target_have_each_its_own_reason(upstream: UpstreamTree) -> None:
    """Where drift is let pass, what fits is applied and what does not has drifted."""

    def hands_on(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return original(x, *args, **kwargs)

    def takes_no_more(original: Any, x: Any, bias: Any = 1) -> Any:
        return original(x, bias)

    upstream.registry.around(GELU, why="w", order=1)(hands_on)
    upstream.registry.around(GELU, why="v", order=2)(takes_no_more)
    pinned, _ = SourceTree(upstream.root).pin(upstream.registry.patches, "upstream", "0.9")
    edit(upstream, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    engine = upstream.engine(pins=Pins("upstream", [pinned]), drift="warn")
    assert upstream.load("user").gelu(1) == 2
    assert [row.state for row in engine.ledger.rows] == ["applied", "drifted"]
