"""Fingerprints, signatures, and what binds a name; all read from source."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from textwrap import dedent

import pytest

from megatron_npu.patching.fingerprint import fingerprint, signature
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.pins import Pin, PinError, PinFile, Pins
from megatron_npu.patching.sources import Source, SourceTree
from megatron_npu.patching.symbols import locate
from megatron_npu.patching.verdicts import compare


def nodes_of(source: str, qualname: str) -> list[ast.stmt]:
    return locate(ast.parse(dedent(source)), qualname)


def print_of(source: str, qualname: str = "f") -> str:
    nodes = nodes_of(source, qualname)
    assert nodes
    return fingerprint(nodes)


CONDITIONAL = """
try:
    from fast import norm, other
except ImportError:
    norm = None
if True:
    def f(x):
        return 1
else:
    with open("x") as handle:
        def f(x):
            return 2
a = b = 0
(c, [d, *e]), g.h = 1, 2
annotated: int = 3
only_declared: int
for i in range(3):
    match i:
        case 1:
            deep = 1
class C:
    if True:
        def m(self): ...
    @property
    def p(self): ...
    @p.setter
    def p(self, value): ...
import x.y
import x.y as z
"""


@pytest.mark.parametrize(
    ("name", "count"),
    [("norm", 2), ("other", 1), ("f", 2), ("handle", 1), ("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1),
     ("annotated", 1), ("only_declared", 0), ("i", 1), ("deep", 1), ("C", 1), ("C.m", 1), ("C.p", 2),
     ("x", 1), ("z", 1), ("y", 0), ("g", 0), ("absent", 0), ("C.absent", 0), ("f.x", 0)],
)  # fmt: skip
def test_locate_finds_every_binding(name: str, count: int) -> None:
    assert len(nodes_of(CONDITIONAL, name)) == count


def test_an_import_is_narrowed_to_the_name() -> None:
    assert print_of("from m import f, g") == print_of("from m import a, f")
    assert print_of("from m import f") != print_of("from n import f")


def test_a_star_import_stands_for_names_that_nothing_binds() -> None:
    assert len(nodes_of("from m import *\nx = 1", "f")) == 1
    assert signature(nodes_of("from m import *\nx = 1", "x")[0]) == "x = ..."


def test_inherited_methods() -> None:
    local = "class Base:\n    def m(self): return 1\nclass Sub(Base): pass"
    assert signature(nodes_of(local, "Sub.m")[0]) == "def m(self)"
    header = nodes_of("class Sub(torch.nn.Module):\n    x = 1", "Sub.m")
    assert signature(header[0]) == "class Sub(torch.nn.Module)"
    assert fingerprint(header) == print_of("class Sub(torch.nn.Module):\n    y = 2", "Sub.m")
    assert nodes_of("class Sub:\n    x = 1", "Sub.m") == []
    assert nodes_of("class A(B): pass\nclass B(A): pass", "A.m") == []


PLAIN = """
def f(x, y=1):
    return x + y
"""


@pytest.mark.parametrize(
    "same",
    [
        'def f(x, y=1):\n    """Add."""\n    return x + y',
        "# comment\n\n\ndef f(x,\n      y=1):\n    # more\n    return (x + y)",
        "def f(x: int, y: int = 1) -> int:\n    return x + y",
    ],
)
def test_fingerprint_ignores(same: str) -> None:
    assert print_of(same) == print_of(PLAIN)


@pytest.mark.parametrize(
    "other",
    [
        "def f(x, y=1):\n    return x - y",
        "def f(x, y=2):\n    return x + y",
        "def f(x, z=1):\n    return x + z",
        "def f(x, *, y=1):\n    return x + y",
        "@jit\ndef f(x, y=1):\n    return x + y",
        "async def f(x, y=1):\n    return x + y",
        "def f(x, y=True):\n    return x + y",
        "def f(x, y=1.0):\n    return x + y",
        "def f(x, y=None):\n    return x + y",
        "def f(x, y=1):\n    'Add.'\n    'not a docstring'\n    return x + y",
    ],
)
def test_fingerprint_sees(other: str) -> None:
    assert print_of(other) != print_of(PLAIN)


def test_none_is_not_nothing() -> None:
    assert print_of("def f(): return None") != print_of("def f(): return")
    assert print_of("f = {**a}") != print_of("f = {}")
    assert print_of("def f(*, a, b=1): ...") != print_of("def f(*, a=1, b): ...")


def test_f_strings_are_the_same_however_they_are_split() -> None:
    assert print_of("f = f'a{x}b' 'c'") == print_of("f = f'a{x}bc'") == print_of("f = '' f'a{x}' f'bc'")
    assert print_of("f = f'a{x!r}'") != print_of("f = f'a{x}'")


def test_the_fingerprint_is_a_fixed_value() -> None:
    """Other Python versions must compute these very values; pin files outlive interpreters."""
    assert print_of(PLAIN) == "75a9e7b28d9ecbe6"
    rich = """
    class f(Base, metaclass=Meta):
        a: int = 1
        @staticmethod
        def s(x, /, *args, k=None, **kw):
            with open(f"{x:>{k}}é" "b") as h, g():
                return [lambda y: y for z in h if (w := z)] + list(x[1:2, ..., None])
        try:
            raise X from None
        except (A, B) as e:
            pass
    """
    assert print_of(rich) == "568d6d3bcbcd2149"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a: int, /, b=[1], *c, d: str = 'x', **e) -> int: ...", "def f(a, /, b=[1], *c, d='x', **e)"),
        ("@staticmethod\n@jit\ndef f(x): ...", "@staticmethod def f(x)"),
        ("async def f(): ...", "async def f()"),
        (
            "class f(A, metaclass=M):\n    def __init__(self, x): ...",
            "class f(A, metaclass=M) def __init__(self, x)",
        ),
        ("from .m import g as f, h", "from .m import g as f"),
        ("f, g = 1, 2", "f, g = ..."),
        ("f: int = 2", "f = ..."),
    ],
)
def test_signature(source: str, expected: str) -> None:
    assert signature(nodes_of(source, "f")[0]) == expected


# --- pin files ---


def patch_of(target: str, kind: str = "replace") -> Patch:
    return Patch(target, kind, len, ("cpu",), "", "", "w", "", "o")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("X = 1\n")
    (tmp_path / "pkg/a.py").write_text(PLAIN)
    return tmp_path


def test_round_trip(tree: Path, tmp_path: Path) -> None:
    patches = [patch_of("pkg.a:f"), patch_of("pkg:X"), patch_of("pkg.a:gone"), patch_of("pkg.b:f")]
    pinned, missing = SourceTree(tree).pin(patches, "upstream", "1.0")
    assert missing == ["pkg.a:gone", "pkg.b:f"]
    path = tmp_path / pinned.name
    path.write_text(pinned.json())
    assert path.name == "upstream-1.0.json"
    assert PinFile.read(path) == pinned
    assert list(json.loads(path.read_text())["targets"]) == ["pkg.a:f", "pkg:X"]
    assert pinned.targets["pkg.a:f"] == Pin(print_of(PLAIN), "def f(x, y=1)", 2)


def test_pins_of_another_upstream_are_not_loaded(tmp_path: Path) -> None:
    for upstream in ("upstream", "upstream-other", "else"):
        pinned = PinFile(upstream, "1.0")
        (tmp_path / pinned.name).write_text(pinned.json())
    assert [file.upstream for file in Pins.load(tmp_path, "upstream").files] == ["upstream"]
    assert Pins.load(tmp_path / "absent", "upstream").files == []


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"format": 1, "upstream": "h"}'])
def test_an_unreadable_pin_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "upstream-1.json").write_text(text)
    with pytest.raises(PinError, match=r"upstream-1\.json"):
        Pins.load(tmp_path, "upstream")


def pins_of(*sources: str) -> Pins:
    files = [
        PinFile("upstream", str(version), {}, {"pkg.a:f": Pin.of(nodes_of(source, "f"))})
        for version, source in enumerate(sources)
    ]
    return Pins("upstream", files)


@pytest.mark.parametrize(
    ("pinned", "kind", "status", "fails"),
    [
        ((PLAIN,), "replace", "same", False),
        (("def f(a): ...", PLAIN, "def f(b): ..."), "replace", "same", False),
        (("def f(x, y=1): ...",), "replace", "body_changed", True),
        (("def f(x, y=1): ...",), "constant", "body_changed", True),
        (("def f(x, y=1): ...",), "wrap", "body_changed", False),
        (("def f(x): ...",), "wrap", "signature_changed", True),
        (("class f: ...",), "wrap", "signature_changed", True),
        ((), "replace", "no_pin", False),
    ],
)
def test_compare(tree: Path, pinned: tuple[str, ...], kind: str, status: str, fails: bool) -> None:
    source = Source("pkg.a", tree / "pkg/a.py")
    verdict = compare(patch_of("pkg.a:f", kind), source, pins_of(*pinned))
    assert (verdict.status, verdict.fails) == (status, fails)
    assert verdict.place == f"{tree}/pkg/a.py:2"


def test_gone(tree: Path) -> None:
    sources, pins = SourceTree(tree), pins_of(PLAIN)
    for target in ("pkg.a:g", "pkg.b:f"):
        verdict = compare(patch_of(target, "wrap"), sources.find(target.partition(":")[0]), pins)
        assert (verdict.status, verdict.fails) == ("gone", True)


def test_a_file_with_a_known_digest_is_not_parsed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, _ = SourceTree(tree).pin([patch_of("pkg.a:f")], "upstream", "1.0")
    pins = Pins("upstream", [pinned])
    monkeypatch.setattr(ast, "parse", lambda *_: pytest.fail("parsed"))
    assert compare(patch_of("pkg.a:f"), Source("pkg.a", tree / "pkg/a.py"), pins).status == "same"


def test_a_known_digest_says_nothing_about_a_target_without_a_pin(tree: Path) -> None:
    pinned, _ = SourceTree(tree).pin([patch_of("pkg.a:f")], "upstream", "1.0")
    (pins := Pins("upstream", [pinned])).files[0].targets.clear()
    assert compare(patch_of("pkg.a:f"), Source("pkg.a", tree / "pkg/a.py"), pins).status == "no_pin"
