"""Whatever is patched in whatever order, undo leaves every dictionary as it was."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.patching.engine import Engine
from megatron_npu.patching.module_patch import Context
from megatron_npu.patching.registry import Registry

PREFIX = "undopkg"
MODEL = """
def f(x): return ("f", x)
alias = f
LIMIT = 3
class Base:
    def forward(self): return "forward"
    @staticmethod
    def s(): return "s"
    @classmethod
    def c(cls): return "c"
    @property
    def p(self): return "p"
class Sub(Base):
    scale = 2
"""
TARGETS = ["f", "alias", "LIMIT", "Base", "Sub", "Sub.scale"] + [
    f"{cls}.{name}" for cls in ("Base", "Sub") for name in ("forward", "s", "c", "p")
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("patch"), st.sampled_from(TARGETS), st.sampled_from(["wrap", "replace"])),
        st.tuples(st.sampled_from(["apply", "undo", "take"]), st.just(""), st.just("")),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, ModuleType]]:
    root: Path = tmp_path_factory.mktemp("undo")
    (root / PREFIX).mkdir()
    (root / PREFIX / "model.py").write_text(MODEL)
    (root / PREFIX / "user.py").write_text("from undopkg.model import *\n")
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    yield importlib.import_module(f"{PREFIX}.model"), importlib.import_module(f"{PREFIX}.user")
    sys.path.remove(str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == PREFIX]:
        del sys.modules[name]


def snapshot(model: ModuleType, user: ModuleType, classes: tuple[type, ...]) -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in (model, user, *classes)]


def record(registry: Registry, target: str, kind: str) -> None:
    name = f"{PREFIX}.model:{target}"
    if target in ("LIMIT", "Sub.scale"):
        if not any(patch.target == name for patch in registry.patches):
            registry.constant(name, object(), why="w")
    elif target in ("Base", "Sub"):
        registry.wrap(name, why="w")(lambda cls: type(cls.__name__, (cls,), {}))
    elif kind == "wrap" or any(patch.target == name for patch in registry.patches):
        registry.wrap(name, why="w")(wrapper())
    else:
        registry.replace(name, why="w")(lambda *args: "new")


def wrapper() -> Callable[[Any], Any]:
    return lambda old: lambda *args: ("wrapped", old(*args))


@settings(max_examples=120)
@given(steps=STEPS)
def test_undo_restores_everything(modules: tuple[ModuleType, ModuleType], steps: list) -> None:
    model, user = modules
    classes = (model.Base, model.Sub)
    before = snapshot(model, user, classes)
    registry = Registry()
    engine = Engine(registry, prefixes=(PREFIX,), on_first=lambda: Context("h", "1", "cpu"))
    engine.arm()
    try:
        for step, target, kind in steps:
            if step == "patch":
                record(registry, target, kind)
            elif step == "apply":
                engine.apply_loaded()
            elif step == "take":
                importlib.reload(user)
            else:
                engine.undo()
                assert_same(snapshot(model, user, classes), before)
        engine.undo()  # what was recorded since the last apply is taken up by the next one
        engine.apply_loaded()
        assert engine.ledger.count("applied") == len(engine.ledger.rows)
    finally:
        engine.undo()
        engine.disarm()
        restore_constant(user, before[1])
    assert_same(snapshot(model, user, classes), before)


def restore_constant(user: ModuleType, before: dict[str, Any]) -> None:
    """A plain value that was taken by value cannot be told from an equal one: undo leaves it."""
    user.LIMIT = before["LIMIT"]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    ignored = {"LIMIT", "__spec__", "__loader__", "__cached__", "__package__", "__file__"}  # of a reload
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if name not in ignored and one[name] is not other[name]] == []
