"""Modules that several threads import at once, and finders that ask each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.patching.conftest import UpstreamTree

LONG = 60  # seconds; only a deadlock lasts that long


class Import(threading.Thread):
    """Imports a module in a thread of its own; ``error`` is what came of it."""

    def __init__(self, upstream: UpstreamTree, name: str) -> None:
        super().__init__(daemon=True)
        self.upstream, self.module, self.error = upstream, name, None
        self.start()

    def run(self) -> None:
        try:
            self.upstream.load(self.module)
        except Exception as error:
            self.error = error


@pytest.fixture
def pair(upstream: UpstreamTree) -> UpstreamTree:
    """Two modules that know nothing of each other, of one function each: ``a.f``, ``b.g``."""
    upstream.write(
        {"stockpkg/a.py": "def f():\n    return 'f'\n", "stockpkg/b.py": "def g():\n    return 'g'\n"},
    )
    return upstream


def test_a_module_that_fails_takes_back_no_other_thread_s_patches(pair: UpstreamTree) -> None:
    begun, proceed = threading.Event(), threading.Event()

    @pair.registry.wrap("stockpkg.a:f", why="w")
    def failing(old: Any) -> Any:
        begun.set()
        assert proceed.wait(LONG)
        raise RuntimeError("a fault of the adaptor")

    pair.registry.wrap("stockpkg.b:g", why="w")(lambda old: lambda: "patched")
    engine = pair.engine()
    other = Import(pair, "a")
    assert begun.wait(LONG)
    b = pair.load("b")
    proceed.set()
    other.join(LONG)
    assert "a fault of the adaptor" in str(other.error)
    assert [row.state for row in engine.ledger.rows] == ["failed", "applied"]
    assert b.g() == "patched"
    engine.undo()
    assert b.g() == "g"


def test_undone_by_one_thread_while_another_patches(pair: UpstreamTree) -> None:
    """What the other thread has changed by then is undone with the rest, what it changes later stays."""
    begun, proceed = threading.Event(), threading.Event()

    @pair.registry.wrap("stockpkg.a:f", why="w")
    def slow(old: Any) -> Any:
        begun.set()
        assert proceed.wait(LONG)
        return lambda: "patched"

    pair.registry.wrap("stockpkg.b:g", why="w")(lambda old: lambda: "patched")
    engine = pair.engine()
    b = pair.load("b")
    other = Import(pair, "a")
    assert begun.wait(LONG)
    engine.undo()
    proceed.set()
    other.join(LONG)
    assert (pair.load("a").f(), b.g()) == ("patched", "g")
    engine.undo()
    assert pair.load("a").f() == "f"


def test_many_at_once(upstream: UpstreamTree) -> None:
    """Every one is patched and can be undone, though half of the modules fail at the same moment."""
    names = [f"part{number}" for number in range(8)]
    upstream.write({f"stockpkg/{name}.py": "def f():\n    return 'f'\n" for name in names})
    barrier = threading.Barrier(len(names))

    def factory(fails: bool) -> Callable[[Any], Any]:
        def make(old: Any) -> Any:
            barrier.wait(LONG)
            if fails:
                raise RuntimeError("a fault of the adaptor")
            return lambda: "patched"

        return make

    for number, name in enumerate(names):
        upstream.registry.wrap(f"stockpkg.{name}:f", why="w")(factory(number % 2 == 1))
    engine = upstream.engine()
    threads = [Import(upstream, name) for name in names]
    for thread in threads:
        thread.join(LONG)
    assert [thread.error is not None for thread in threads] == [False, True] * 4
    assert [row.state for row in engine.ledger.rows] == ["applied", "failed"] * 4
    assert {upstream.load(name).f() for name in names[::2]} == {"patched"}
    engine.undo()
    assert {upstream.load(name).f() for name in names[::2]} == {"f"}


class AskingFinder:
    """A finder of somebody else, which asks all the others as ours does."""

    def __init__(self) -> None:
        self.asked = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        self.asked += 1
        specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        return next(filter(None, specs), None)


def test_two_engines_share_a_prefix(upstream: UpstreamTree) -> None:
    upstream.registry.wrap("stockpkg.model:gelu", why="w")(lambda old: lambda *args: ("first", old(*args)))
    upstream.engine()
    other = UpstreamTree(upstream.root)
    other.registry.wrap("stockpkg.model:gelu", why="w")(lambda old: lambda *args: ("second", old(*args)))
    second = other.engine()
    try:
        user = upstream.load("user")
        assert user.gelu(1) == ("second", ("first", 2))
    finally:
        second.undo()
        second.disarm()
    assert user.gelu(1) == ("first", 2)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_foreign_finder_that_asks_all_the_others(
    upstream: UpstreamTree, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    upstream.registry.wrap("stockpkg.model:gelu", why="w")(lambda old: lambda *args: "wrapped")
    upstream.engine()
    foreign = AskingFinder()
    at = 0 if place == "before" else 1
    with monkeypatch.context() as patch:  # ended before the fixture disarms the engine
        patch.setattr(sys, "meta_path", [*sys.meta_path[:at], foreign, *sys.meta_path[at:]])
        assert upstream.load("user").gelu(1) == "wrapped"
    assert foreign.asked


def test_a_name_may_be_asked_for_again_after_an_error(
    upstream: UpstreamTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            raise OSError("a broken finder")

    upstream.registry.wrap("stockpkg.model:gelu", why="w")(lambda old: lambda *args: "wrapped")
    upstream.engine()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [sys.meta_path[0], Broken(), *sys.meta_path[1:]])
        with pytest.raises(OSError, match="a broken finder"):
            upstream.load("user")
    assert upstream.load("user").gelu(1) == "wrapped"
