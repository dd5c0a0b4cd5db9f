"""Every kind of target: applied, called, undone."""

from __future__ import annotations

import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest

from megatron_npu.patching.module_patch import PatchError
from megatron_npu.patching.patch import NotAsked
from tests.unit.patching.conftest import UpstreamTree

T = "stockpkg.model:"


def snapshot(module: ModuleType) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(owner)) for name, owner in
            {"": module, "Base": module.Base, "Core": module.Core}.items()}  # fmt: skip


def wrap(upstream: UpstreamTree, target: str) -> None:
    @upstream.registry.wrap(T + target, why="w")
    def factory(old: Any) -> Any:
        return lambda *args, **kwargs: ("wrapped", old(*args, **kwargs))


CALLS = {
    "gelu": (lambda m: m.gelu(1), 2),
    "Core.method": (lambda m: m.Core().method(1), ("method", 1)),
    "Core.static": (lambda m: m.Core().static(1), ("static", 1)),
    "Core.klass": (lambda m: m.Core.klass(1), ("klass", "Core", 1)),
    "Core.size": (lambda m: m.Core().size, 5),
    "Core.forward": (lambda m: m.Core().forward(1), ("base", 1)),
    "Base.forward": (lambda m: m.Base().forward(1), ("base", 1)),
}


@pytest.mark.parametrize("target", CALLS)
def test_wrap_and_undo(upstream: UpstreamTree, target: str) -> None:
    call, plain = CALLS[target]
    before = snapshot(upstream.load("model"))
    wrap(upstream, target)
    engine = upstream.engine()
    model = upstream.load("model")
    engine.apply_loaded()
    assert call(model) == ("wrapped", plain)
    engine.undo()
    assert call(model) == plain
    assert snapshot(model) == before


@pytest.mark.parametrize("target", [name for name in CALLS if name != "gelu"])
def test_replacement_keeps_the_descriptor(upstream: UpstreamTree, target: str) -> None:
    def new(*args: Any) -> Any:
        return ("new", len(args))

    upstream.registry.replace(T + target, why="w")(new)
    upstream.engine()
    model = upstream.load("model")
    counts = {"Core.static": 1, "Core.size": 1}  # no self; self alone
    assert CALLS[target][0](model) == ("new", counts.get(target, 2))
    if target == "Core.size":
        instance = model.Core()
        instance.size = 9
        assert instance.stored == 9


def test_inherited_method_is_set_on_the_subclass_alone(upstream: UpstreamTree) -> None:
    wrap(upstream, "Core.forward")
    engine = upstream.engine()
    model = upstream.load("model")
    assert model.Base().forward(1) == ("base", 1)
    assert "forward" in vars(model.Core)
    engine.undo()
    assert "forward" not in vars(model.Core)


def test_constants_and_class_attributes(upstream: UpstreamTree) -> None:
    upstream.registry.constant(T + "LIMIT", 7, why="w")
    upstream.registry.constant(T + "Core.scale", None, why="w")
    engine = upstream.engine()
    user, model = upstream.load("user"), upstream.load("model")
    assert (user.LIMIT, model.LIMIT, model.Core.scale) == (7, 7, None)
    engine.undo()
    assert (model.LIMIT, model.Core.scale) == (3, 2)


def test_wraps_stack_in_order_on_top_of_the_replacement(upstream: UpstreamTree) -> None:
    for mark in "ab":
        scope: dict = {"__name__": f"adaptor_{mark}"}
        exec(f"def factory(old): return lambda x: {mark!r} + old(x)", scope)
        upstream.registry.wrap(T + "gelu", why="w")(scope["factory"])

    @upstream.registry.replace(T + "gelu", why="w")
    def new(x: Any) -> str:
        return "new"

    upstream.engine()
    assert upstream.load("user").gelu(1) == "banew"


def test_a_class_is_replaced_after_its_methods(upstream: UpstreamTree) -> None:
    @upstream.registry.wrap(T + "Core", why="w")
    def subclass(core: type) -> type:
        return type("Core", (core,), {"extra": 1})

    wrap(upstream, "Core.method")
    engine = upstream.engine()
    user = upstream.load("user")
    assert user.Core.extra == 1
    assert user.Core().method(1) == ("wrapped", ("method", 1))
    engine.undo()
    assert not hasattr(user.Core, "extra")
    assert user.Core().method(1) == ("method", 1)


def test_a_wrapped_function_keeps_name_signature_and_pickles(upstream: UpstreamTree) -> None:
    wrap(upstream, "gelu")
    upstream.engine()
    gelu = upstream.load("model").gelu
    assert gelu.__name__ == "gelu"
    assert str(inspect.signature(gelu)) == "(x, bias=1)"
    assert pickle.loads(pickle.dumps(gelu)) is gelu


@pytest.mark.parametrize("drift", ["error", "warn"])
@pytest.mark.parametrize("target", ["absent", "Core.absent", "Absent.method", "gelu.inner"])
def test_a_missing_target_is_never_created(upstream: UpstreamTree, target: str, drift: str) -> None:
    calls = []

    @upstream.registry.wrap(T + target, why="w")
    def factory(old: Any) -> Any:
        calls.append(old)
        return old

    engine = upstream.engine(drift=drift)
    if drift == "error":
        with pytest.raises(PatchError, match=f"stockpkg.model:{target} .*: missing in "):
            upstream.load("model")
    else:
        model = upstream.load("model")
        assert not hasattr(model, "absent")
        assert not hasattr(model, "Absent")
        assert not hasattr(model.Core, "absent")
    assert not calls
    assert engine.ledger.rows[0].state == "failed"


def test_a_failing_factory_fails_the_import_and_leaves_nothing(upstream: UpstreamTree) -> None:
    wrap(upstream, "Core.method")

    @upstream.registry.wrap(T + "gelu", why="w")
    def factory(old: Any) -> Any:
        raise RuntimeError("boom")

    upstream.engine(arm=False)
    model = upstream.load("model")
    before = snapshot(model)
    upstream.engines[0].arm()
    with pytest.raises(PatchError, match="boom"):
        upstream.engines[0].apply_loaded()
    assert snapshot(model) == before
    assert upstream.engines[0].ledger.count("applied") == 0


def test_what_others_set_since_is_left_alone(
    upstream: UpstreamTree, caplog: pytest.LogCaptureFixture
) -> None:
    wrap(upstream, "gelu")
    engine = upstream.engine()
    model = upstream.load("model")
    model.gelu = foreign = lambda x: "foreign"
    engine.undo()
    assert model.gelu is foreign
    assert "changed by other code" in caplog.text


def test_skipped_for_another_device_and_by_condition(upstream: UpstreamTree) -> None:
    upstream.registry.constant(T + "LIMIT", 7, why="w", devices=("npu",))
    upstream.registry.constant(T + "Core.scale", 7, why="w", condition=lambda: "apex is here")
    engine = upstream.engine()
    model = upstream.load("model")
    assert (model.LIMIT, model.Core.scale) == (3, 2)
    assert engine.ledger.summary() == "0 applied, 0 drifted, 2 skipped (apex is here; for npu, not cpu)"


def test_what_was_off_is_applied_when_it_is_wanted_later(upstream: UpstreamTree) -> None:
    """Names that others took by value are repaired, and all of it is undone in the end."""
    asked: list[NotAsked | None] = [NotAsked("off")]
    for times in (2, 3):

        @upstream.registry.around(
            T + "gelu", why=f"w{times}", condition=lambda times=times: asked[-1] if times == 3 else None
        )
        def scaled(original: Any, *args: Any, times: int = times) -> Any:
            return times * original(*args)

    upstream.write({"stockpkg/user.py": "from stockpkg.model import gelu"})
    engine = upstream.engine()
    model, user = upstream.load("model"), upstream.load("user")
    engine.reconsider()
    assert model.gelu(1) == 4
    asked.append(None)
    engine.reconsider()
    engine.reconsider()  # once is enough
    assert model.gelu(1) == user.gelu(1) == 12
    assert {row.state for row in engine.ledger.rows} == {"applied"}
    engine.undo()
    assert model.gelu(1) == user.gelu(1) == 2
