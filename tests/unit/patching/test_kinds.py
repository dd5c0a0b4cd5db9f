"""Every kind of target: applied, called, undone."""

from __future__ import annotations

import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest

from megatron_npu.patching.hooks import PatchError
from tests.unit.patching.conftest import HostTree

T = "hostpkg.model:"


def snapshot(module: ModuleType) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(owner)) for name, owner in
            {"": module, "Base": module.Base, "Core": module.Core}.items()}  # fmt: skip


def wrap(host: HostTree, target: str) -> None:
    @host.registry.wrap(T + target, why="w")
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
def test_wrap_and_undo(host: HostTree, target: str) -> None:
    call, plain = CALLS[target]
    before = snapshot(host.load("model"))
    wrap(host, target)
    engine = host.engine()
    model = host.load("model")
    engine.apply_loaded()
    assert call(model) == ("wrapped", plain)
    engine.undo()
    assert call(model) == plain
    assert snapshot(model) == before


@pytest.mark.parametrize("target", [name for name in CALLS if name != "gelu"])
def test_replacement_keeps_the_descriptor(host: HostTree, target: str) -> None:
    def new(*args: Any) -> Any:
        return ("new", len(args))

    host.registry.replace(T + target, why="w")(new)
    host.engine()
    model = host.load("model")
    counts = {"Core.static": 1, "Core.size": 1}  # no self; self alone
    assert CALLS[target][0](model) == ("new", counts.get(target, 2))
    if target == "Core.size":
        instance = model.Core()
        instance.size = 9
        assert instance.stored == 9


def test_inherited_method_is_set_on_the_subclass_alone(host: HostTree) -> None:
    wrap(host, "Core.forward")
    engine = host.engine()
    model = host.load("model")
    assert model.Base().forward(1) == ("base", 1)
    assert "forward" in vars(model.Core)
    engine.undo()
    assert "forward" not in vars(model.Core)


def test_constants_and_class_attributes(host: HostTree) -> None:
    host.registry.constant(T + "LIMIT", 7, why="w")
    host.registry.constant(T + "Core.scale", None, why="w")
    engine = host.engine()
    user, model = host.load("user"), host.load("model")
    assert (user.LIMIT, model.LIMIT, model.Core.scale) == (7, 7, None)
    engine.undo()
    assert (model.LIMIT, model.Core.scale) == (3, 2)


def test_wraps_stack_in_order_on_top_of_the_replacement(host: HostTree) -> None:
    for mark in "ab":
        scope: dict = {"__name__": f"adaptor_{mark}"}
        exec(f"def factory(old): return lambda x: {mark!r} + old(x)", scope)
        host.registry.wrap(T + "gelu", why="w")(scope["factory"])

    @host.registry.replace(T + "gelu", why="w")
    def new(x: Any) -> str:
        return "new"

    host.engine()
    assert host.load("user").gelu(1) == "banew"


def test_a_class_is_replaced_after_its_methods(host: HostTree) -> None:
    @host.registry.wrap(T + "Core", why="w")
    def subclass(core: type) -> type:
        return type("Core", (core,), {"extra": 1})

    wrap(host, "Core.method")
    engine = host.engine()
    user = host.load("user")
    assert user.Core.extra == 1
    assert user.Core().method(1) == ("wrapped", ("method", 1))
    engine.undo()
    assert not hasattr(user.Core, "extra")
    assert user.Core().method(1) == ("method", 1)


def test_a_wrapped_function_keeps_name_signature_and_pickles(host: HostTree) -> None:
    wrap(host, "gelu")
    host.engine()
    gelu = host.load("model").gelu
    assert gelu.__name__ == "gelu"
    assert str(inspect.signature(gelu)) == "(x, bias=1)"
    assert pickle.loads(pickle.dumps(gelu)) is gelu


@pytest.mark.parametrize("drift", ["error", "warn"])
@pytest.mark.parametrize("target", ["absent", "Core.absent", "Absent.method", "gelu.inner"])
def test_a_missing_target_is_never_created(host: HostTree, target: str, drift: str) -> None:
    calls = []

    @host.registry.wrap(T + target, why="w")
    def factory(old: Any) -> Any:
        calls.append(old)
        return old

    engine = host.engine(drift=drift)
    if drift == "error":
        with pytest.raises(PatchError, match=f"hostpkg.model:{target}.*gone"):
            host.load("model")
    else:
        model = host.load("model")
        assert not hasattr(model, "absent")
        assert not hasattr(model, "Absent")
        assert not hasattr(model.Core, "absent")
    assert not calls
    assert engine.ledger.rows[0].state == "failed"


def test_a_failing_factory_fails_the_import_and_leaves_nothing(host: HostTree) -> None:
    wrap(host, "Core.method")

    @host.registry.wrap(T + "gelu", why="w")
    def factory(old: Any) -> Any:
        raise RuntimeError("boom")

    host.engine(arm=False)
    model = host.load("model")
    before = snapshot(model)
    host.engines[0].arm()
    with pytest.raises(PatchError, match="boom"):
        host.engines[0].apply_loaded()
    assert snapshot(model) == before
    assert host.engines[0].ledger.count("applied") == 0


def test_what_others_set_since_is_left_alone(host: HostTree, caplog: pytest.LogCaptureFixture) -> None:
    wrap(host, "gelu")
    engine = host.engine()
    model = host.load("model")
    model.gelu = foreign = lambda x: "foreign"
    engine.undo()
    assert model.gelu is foreign
    assert "changed by others" in caplog.text


def test_skipped_for_another_device_and_by_condition(host: HostTree) -> None:
    host.registry.constant(T + "LIMIT", 7, why="w", devices=("npu",))
    host.registry.constant(T + "Core.scale", 7, why="w", condition=lambda: "apex is here")
    engine = host.engine()
    model = host.load("model")
    assert (model.LIMIT, model.Core.scale) == (3, 2)
    assert engine.ledger.summary() == "0 applied, 0 drifted, 2 skipped (for npu, not cpu; apex is here)"
