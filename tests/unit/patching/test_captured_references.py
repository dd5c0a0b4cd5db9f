"""Values that a body has made of a symbol before it was patched are left, and found by the tests' search."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_npu.patching.engine import Engine
from tests.captured_references import held
from tests.unit.patching.conftest import UpstreamTree

HOLDERS = '''
import collections, dataclasses, functools

def h(x=1):
    """The one that is patched."""
    return "stock"

class Base:
    def method(self):
        return "stock"
    @staticmethod
    def static():
        return "stock"

TABLE = {"h": h, "nested": [h, {"deep": h}]}
ORDERED = collections.OrderedDict(h=h)
LIST = [h]
partial = functools.partial(h)
argument = functools.partial(lambda f: f(), f=h)
METHODS = {"m": Base.method, "s": Base.static}

def default(f=h):
    return f()

def keyword(*, f=h):
    return f()

def decorate(f):
    @functools.wraps(f)
    def inner():
        return f()
    return inner

again = decorate(h)

@decorate
def decorated(f=h):
    return f()

@dataclasses.dataclass
class Data:
    f: object = h
    made: object = dataclasses.field(default_factory=h)

class Class:
    attribute = staticmethod(lambda f=h: f())
    table = {"h": h}
    def method(self, f=h):
        return f()
'''
USES = {
    "TABLE": lambda m: m.TABLE["h"](),
    "nested list": lambda m: m.TABLE["nested"][0](),
    "nested dict": lambda m: m.TABLE["nested"][1]["deep"](),
    "ORDERED": lambda m: m.ORDERED["h"](),
    "LIST": lambda m: m.LIST[0](),
    "partial": lambda m: m.partial(),
    "argument of a partial": lambda m: m.argument(),
    "method": lambda m: m.METHODS["m"](m.Base()),
    "static method": lambda m: m.METHODS["s"](),
    "default": lambda m: m.default(),
    "keyword default": lambda m: m.keyword(),
    "closure": lambda m: m.again(),
    "default below a decorator": lambda m: m.decorated(),
    "field": lambda m: m.Data().f(),
    "field's default": lambda m: m.dataclasses.fields(m.Data)[0].default(),
    "field's factory": lambda m: m.Data().made,
    "default in a class": lambda m: m.Class.attribute(),
    "table in a class": lambda m: m.Class.table["h"](),
    "default of a method": lambda m: m.Class().method(),
}


@pytest.fixture
def holding(upstream: UpstreamTree) -> UpstreamTree:
    """The upstream with a module ``holders``, and wraps of what its values hold."""
    upstream.write({"stockpkg/holders.py": HOLDERS})
    for name in ("h", "Base.method", "Base.static"):
        upstream.registry.wrap(f"stockpkg.holders:{name}", why="w")(lambda old: lambda *args: "patched")
    return upstream


def used(module: Any) -> dict[str, str]:
    return {name: use(module) for name, use in USES.items()}


HELD = {
    "h": [
        "Class.attribute (a default)",
        "Class.method (a default)",
        "Class.table['h']",
        "Data.__dataclass_fields__['f'].default",
        "Data.__dataclass_fields__['made'].default_factory",
        "Data.__init__ (a default)",
        "Data.f",
        "LIST",
        "ORDERED['h']",
        "TABLE['h']",
        "TABLE['nested']",
        "TABLE['nested']['deep']",
        "again (its closure's f)",
        "argument (an argument)",
        "decorated (its closure's f) (a default)",
        "default (a default)",
        "keyword (a default)",
        "partial",
    ],
    "Base.method": ["METHODS['m']"],
    "Base.static": ["METHODS['s']"],
}
OF_DATACLASSES = "Data.__init__ (its closure's "  # Pythons differ in how a dataclass keeps a factory


def places(engine: Engine) -> dict[str, list[str]]:
    """Return what still holds each original."""
    told = {}
    for target, found in held(engine).items():
        names = [place.removeprefix("stockpkg.holders.") for place in found]
        told[target.partition(":")[2]] = sorted(p for p in names if not p.startswith(OF_DATACLASSES))
    return told


@pytest.mark.parametrize("late", [False, True])
def test_values_are_left_and_found(holding: UpstreamTree, late: bool) -> None:
    if late:
        holding.load("holders")
    engine = holding.engine()
    engine.apply_loaded()
    module = holding.load("holders")
    assert (module.h(), module.Base().method(), module.Base.static()) == ("patched",) * 3
    assert used(module) == dict.fromkeys(USES, "stock")
    assert places(engine) == HELD
    assert [row.repaired for row in engine.ledger.rows] == [[], [], []]
    engine.undo()
    assert (module.h(), module.Base().method(), module.Base.static()) == ("stock",) * 3
    assert used(module) == dict.fromkeys(USES, "stock")
    assert places(engine) == {}


def found(upstream: UpstreamTree, source: str) -> list[str]:
    """Return what still holds the original of ``h`` after an import of ``source``."""
    upstream.write({"stockpkg/holders.py": f"import functools\n{source}"})

    @upstream.registry.replace("stockpkg.holders:h", why="w")
    class New:
        pass

    engine = upstream.engine()
    upstream.load("holders")
    assert engine.ledger.rows[0].state == "applied"
    return held(engine)["stockpkg.holders:h"]


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("def h(): pass\nPAIR = (h, 1)\n", "PAIR"),
        ("def h(): pass\nSET = {h}\n", "SET"),
        ("def h(): pass\nNAMES = {h: 'h'}\n", "NAMES (a key)"),
        ("def h(): pass\ncached = functools.lru_cache(h)\n", "cached (a cache)"),
        ("def h(f): return f\npartial = functools.partial(print, h)\n", "partial (an argument)"),
        ("class h: pass\nclass Sub(h): pass\n", "Sub (a base class)"),
    ],
)
def test_each_kind_of_holder_is_found(upstream: UpstreamTree, source: str, where: str) -> None:
    assert found(upstream, source) == [f"stockpkg.holders.{where}"]


def test_a_table_with_an_imported_symbol_is_found(upstream: UpstreamTree) -> None:
    """The module may mean the one of its true home there."""
    assert found(upstream, "from stockpkg.model import gelu as h\nTABLE = {'h': h}\n") == [
        "stockpkg.holders.TABLE['h']"
    ]
    assert upstream.load("holders").TABLE["h"] is upstream.load("model").gelu


@pytest.mark.parametrize(
    "source",
    [
        "class h:\n    def me(self):\n        return super(), __class__\n",
        "def h(): pass\ndef user(x: h) -> h: pass\nclass Typed:\n    x: h\n",
        "def h(): pass\nclass Object:\n    pass\nobject = Object()\nobject.h = h\n",
    ],
)
def test_what_is_no_business_of_the_patch(upstream: UpstreamTree, source: str) -> None:
    """The class that a body made for ``super()``, annotations, what instances hold."""
    assert found(upstream, source) == []


def test_a_symbol_of_another_package_is_another_module_s_to_hold(upstream: UpstreamTree) -> None:
    """Where upstream has put a name of its own in place of torch's, other modules still mean torch's."""
    upstream.write(
        {
            "stockpkg/holders.py": "from collections import OrderedDict as h\nTABLE = {'h': h}\n",
            "stockpkg/other.py": "from collections import OrderedDict\nclass Sub(OrderedDict): pass\n",
        }
    )
    upstream.load("other")
    assert found(upstream, "from collections import OrderedDict as h\nTABLE = {'h': h}\n") == [
        "stockpkg.holders.TABLE['h']"
    ]


def test_the_original_that_the_new_function_calls_is_left_to_it(upstream: UpstreamTree) -> None:
    upstream.write({"stockpkg/holders.py": "def h():\n    return 'stock'\n"})
    upstream.registry.wrap("stockpkg.holders:h", why="w")(lambda old: lambda: ("first", old()))
    upstream.registry.wrap("stockpkg.holders:h", why="w")(lambda old: lambda: ("second", old()))
    engine = upstream.engine()
    assert upstream.load("holders").h() == ("second", ("first", "stock"))
    assert places(engine) == {"h": []}


def test_a_module_that_took_the_name_has_its_values_found_too(upstream: UpstreamTree) -> None:
    upstream.write({"stockpkg/taker.py": "from stockpkg.model import gelu\nTABLE = {'gelu': gelu}\n"})
    upstream.registry.wrap("stockpkg.model:gelu", why="w")(lambda old: lambda *args: "patched")
    taker = upstream.load("taker")
    engine = upstream.engine()
    engine.apply_loaded()
    assert taker.gelu(1) == "patched"
    assert taker.TABLE["gelu"](1) == 2
    assert engine.ledger.rows[0].repaired == ["stockpkg.taker.gelu"]
    assert held(engine)["stockpkg.model:gelu"] == ["stockpkg.taker.TABLE['gelu']"]


def test_a_value_that_somebody_has_set_since_is_left_by_undo(holding: UpstreamTree) -> None:
    engine = holding.engine()
    module = holding.load("holders")
    module.TABLE["h"] = module.LIST[0] = str
    module.TABLE["nested"].clear()
    engine.undo()
    assert module.TABLE["h"] is module.LIST[0] is str
    assert module.TABLE["nested"] == []
    assert module.ORDERED["h"]() == "stock"
