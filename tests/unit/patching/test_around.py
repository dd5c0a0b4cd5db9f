"""``around``: a function that is called with the original first."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from megatron_npu.patching.module_patch import PatchError
from tests.unit.patching.conftest import UpstreamTree
from tests.unit.patching.test_kinds import CALLS, T, snapshot


def mark(original: Any, *args: Any, **kwargs: Any) -> Any:
    return "around", original(*args, **kwargs)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("target", CALLS)
def test_every_kind_of_target_early_and_late(upstream: UpstreamTree, target: str, late: bool) -> None:
    call, plain = CALLS[target]
    engine = upstream.engine(arm=False)
    if not late:
        engine.arm()
    upstream.registry.around(T + target, why="w")(mark)
    model = upstream.load("model")
    before = snapshot(model) if late else None
    engine.arm()
    engine.apply_loaded()
    assert call(model) == ("around", plain)
    assert engine.ledger.rows[0].state == "applied"
    assert engine.ledger.rows[0].late is late
    engine.undo()
    assert call(model) == plain
    assert before is None or snapshot(model) == before


def test_the_arguments_come_after_the_original(upstream: UpstreamTree) -> None:
    seen = []

    @upstream.registry.around(T + "Core.method", why="w")
    def method(original: Any, self: Any, x: int) -> Any:
        seen.append((type(self).__name__, x))
        return original(self, x + 1)

    @upstream.registry.around(T + "Core.klass", why="w")
    def klass(original: Any, cls: type, x: int) -> Any:
        seen.append((cls.__name__, x))
        return original(cls, x + 1)

    @upstream.registry.around(T + "Core.static", why="w")
    def static(original: Any, x: int) -> Any:
        return original(x + 1)

    @upstream.registry.around(T + "gelu", why="w")
    def gelu(original: Any, x: int, *, bias: int = 5) -> Any:
        return original(x, bias=bias)

    upstream.engine()
    core, model = upstream.load("user").Core, upstream.load("model")
    subclass = type("Sub", (core,), {})
    assert core().method(1) == ("method", 2)
    assert subclass.klass(1) == ("klass", "Sub", 2)
    assert core.static(1) == ("static", 2)
    assert (model.gelu(1), model.gelu(1, bias=2)) == (6, 3)
    assert seen == [("Core", 1), ("Sub", 1)]


def test_a_property_keeps_its_setter(upstream: UpstreamTree) -> None:
    upstream.registry.around(T + "Core.size", why="w")(mark)
    upstream.engine()
    core = upstream.load("model").Core()
    core.size = 9
    assert (core.stored, core.size) == (9, ("around", 5))


def test_it_stacks_with_wraps_in_order_on_top_of_the_replacement(upstream: UpstreamTree) -> None:
    upstream.registry.around(T + "gelu", why="first")(lambda original, x: "a" + original(x))
    upstream.registry.wrap(T + "gelu", why="second")(lambda original: lambda x: "b" + original(x))
    upstream.registry.around(T + "gelu", why="third")(lambda original, x: "c" + original(x))
    upstream.registry.replace(T + "gelu", why="below")(lambda x: "new")
    engine = upstream.engine()
    user = upstream.load("user")
    assert user.gelu(1) == "cbanew"
    assert engine.ledger.count("applied") == 4
    engine.undo()
    assert user.gelu(1) == 2


def test_the_original_need_not_be_called(upstream: UpstreamTree) -> None:
    upstream.registry.around(T + "gelu", why="w")(lambda original, x: x if x < 0 else original(x))
    upstream.engine()
    gelu = upstream.load("model").gelu
    assert (gelu(-4), gelu(1)) == (-4, 2)


def test_name_signature_docstring_and_pickling_stay_upstream_s(upstream: UpstreamTree) -> None:
    upstream.registry.around(T + "gelu", why="w")(mark)
    upstream.registry.around(T + "Core.method", why="w")(mark)
    engine = upstream.engine()
    model = upstream.load("model")
    assert (model.gelu.__name__, model.gelu.__module__, model.gelu.__doc__) == (
        "gelu",
        "stockpkg.model",
        "Add.",
    )
    assert str(inspect.signature(model.gelu)) == "(x, bias=1)"
    assert pickle.loads(pickle.dumps(model.gelu)) is model.gelu
    assert pickle.loads(pickle.dumps(model.Core.method)) is model.Core.method
    pickled = pickle.dumps(model.gelu)
    engine.undo()
    assert pickle.loads(pickled)(1) == 2  # it is the address that travels


def test_a_late_one_is_repaired_where_the_name_was_taken(upstream: UpstreamTree) -> None:
    user = upstream.load("user")
    upstream.registry.around(T + "gelu", why="w")(mark)
    engine = upstream.engine()
    engine.apply_loaded()
    assert user.gelu(1) == ("around", 2)
    assert engine.ledger.rows[0].repaired == ["stockpkg.user.gelu"]


def test_an_early_one_fails_late(upstream: UpstreamTree) -> None:
    model = upstream.load("model")
    upstream.registry.around(T + "gelu", why="w", early=True)(mark)
    engine = upstream.engine()
    engine.apply_loaded()
    assert model.gelu(1) == 2
    assert engine.ledger.rows[0].state == "failed"


def test_a_class_is_refused_with_the_remedy(upstream: UpstreamTree) -> None:
    upstream.registry.around(T + "Core", why="w")(mark)
    upstream.engine()
    with pytest.raises(
        PatchError, match="Core is a class, to which around cannot be applied: use wrap instead"
    ):
        upstream.load("model")
