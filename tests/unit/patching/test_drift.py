"""What the engine does when upstream is not what a patch was written against."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from megatron_npu.patching.hooks import DriftError, PatchError
from megatron_npu.patching.pins import Pins, SourceTree
from tests.unit.patching.conftest import MODEL, HostTree

GELU = "hostpkg.model:gelu"


def new(*args: Any) -> Any:
    return "new"


def factory(old: Any) -> Any:
    return lambda *args: ("wrapped", old(*args))


@pytest.fixture(params=["replace", "wrap"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def pin(host: HostTree, kind: str) -> Pins:
    """Record a patch of ``gelu`` and pin it as it is now."""
    getattr(host.registry, kind)(GELU, why="w")(new if kind == "replace" else factory)
    pinned, missing = SourceTree(host.root).pin(host.registry.patches, "host", "0.9")
    assert not missing
    return Pins("host", [pinned])


def edit(host: HostTree, old: str, changed: str) -> None:
    assert old in MODEL
    host.write({"hostpkg/model.py": MODEL.replace(old, changed)})


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_same(host: HostTree, kind: str, mode: str) -> None:
    pins = pin(host, kind)
    edit(host, '"""Add."""', '"""Add two numbers."""')
    engine = host.engine(pins=pins, drift=mode)
    assert host.load("user").gelu(1) in ("new", ("wrapped", 2))
    assert (engine.ledger.rows[0].state, engine.ledger.rows[0].reason) == ("applied", "")


def test_changed_body(host: HostTree, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    pins = pin(host, kind)
    edit(host, "return x + bias", "return bias + x")
    engine = host.engine(pins=pins)
    if kind == "replace":
        with pytest.raises(DriftError):
            host.load("user")
        assert "hostpkg.model" not in sys.modules
        assert engine.ledger.rows[0].state == "failed"
    else:
        assert host.load("user").gelu(1) == ("wrapped", 2)
        assert engine.ledger.rows[0].state == "applied"
        assert "body changed" in engine.ledger.rows[0].reason
        assert len(caplog.records) == 1


def test_changed_signature_is_an_error_with_one_clear_message(host: HostTree, kind: str) -> None:
    pins = pin(host, kind)
    edit(host, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    host.engine(pins=pins)
    with pytest.raises(DriftError) as caught:
        host.load("user")
    message = str(caught.value)
    for part in (GELU, "host 1.0", f"{host.root}/hostpkg/model.py:5", "megatron-npu check --megatron PATH"):
        assert part in message
    assert "def gelu(x, bias=1)" in message
    assert "exact=False" in message
    with pytest.raises(DriftError):  # and again, not silently unpatched
        host.load("user")


def test_changed_signature_is_applied_on_request(
    host: HostTree, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    pins = pin(host, kind)
    edit(host, "def gelu(x, bias=1):", "def gelu(x, bias=1, *, exact=False):")
    engine = host.engine(pins=pins, drift="warn")
    assert host.load("user").gelu(1) in ("new", ("wrapped", 2))
    assert engine.ledger.rows[0].state == "drifted"
    assert engine.ledger.summary().startswith("0 applied, 1 drifted (signature changed")
    assert len(caplog.records) == 1


def test_gone(host: HostTree, kind: str) -> None:
    pins = pin(host, kind)
    edit(host, "def gelu(", "def gelu_renamed(")
    host.write({"hostpkg/user.py": ""})
    host.engine(pins=pins)
    with pytest.raises(DriftError, match="nothing in the file defines it"):
        host.load("model")
    engine = host.engine(pins=pins, drift="warn", arm=False)
    host.engines[0].disarm()
    engine.arm()
    assert not hasattr(host.load("model"), "gelu")
    assert engine.ledger.rows[0].state == "failed"


def test_without_a_pin(host: HostTree, kind: str) -> None:
    pin(host, kind)
    engine = host.engine(pins=Pins("host", []))
    host.load("user")
    row = engine.ledger.rows[0]
    assert (row.state, row.reason) == ("applied", "no pin")


def test_defined_on_a_condition_that_is_not_met(host: HostTree) -> None:
    host.write({"hostpkg/model.py": "if False:\n    def gelu(x):\n        return x\n"})
    pins = pin(host, "wrap")
    engine = host.engine(pins=pins)
    host.load("model")
    assert engine.ledger.rows[0].state == "skipped"
    assert "condition" in engine.ledger.rows[0].reason


def test_drift_in_a_module_imported_before(host: HostTree) -> None:
    pins = pin(host, "replace")
    edit(host, "return x + bias", "return bias + x")
    user = host.load("user")
    engine = host.engine(pins=pins)
    with pytest.raises(DriftError):
        engine.apply_loaded()
    assert user.gelu(1) == 2
    host.write({"hostpkg/later.py": ""})
    with pytest.raises(DriftError):  # whoever swallowed the first one meets it again
        host.load("later")


def test_one_message_names_every_drifted_target(host: HostTree) -> None:
    host.registry.constant("hostpkg.model:LIMIT", 9, why="w")
    pins = pin(host, "replace")
    edit(host, "LIMIT = 3", "LIMIT = 4")
    host.write(
        {"hostpkg/model.py": (host.root / "hostpkg/model.py").read_text().replace("x + bias", "bias + x")}
    )
    host.engine(pins=pins)
    with pytest.raises(DriftError, match=r"(?s)model:LIMIT.*model:gelu"):
        host.load("model")


def test_a_patch_error_names_its_origin(host: HostTree) -> None:
    @host.registry.wrap("hostpkg.model:Core.method", why="w")
    def broken(old: Any) -> Any:
        raise KeyError("x")

    host.engine()
    with pytest.raises(PatchError, match=r"Core\.method.*broken.*KeyError"):
        host.load("model")
