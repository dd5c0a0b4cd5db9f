"""Records: what is refused at registration, and what selects a patch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.registry import PatchConflict, Registry, in_order
from megatron_npu.patching.versions import admits, versions_overlap


def first(x: int) -> int:
    return x


def second(x: int) -> int:
    return x


def make_patch(**changes: object) -> Patch:
    fields = {"target": "a.b:C.d", "kind": "replace", "make": first, "devices": ("cpu",), "upstream": "",
              "versions": "", "why": "w", "until": "", "origin": "here"}  # fmt: skip
    return Patch(**{**fields, **changes})


def test_second_replacement_is_refused_and_names_both_origins() -> None:
    registry = Registry()
    registry.replace("a.b:f", why="w", devices=("npu", "cpu"))(first)
    with pytest.raises(PatchConflict) as caught:
        registry.replace("a.b:f", why="w", devices=("cpu",))(second)
    assert "test_registry.first" in str(caught.value)
    assert "test_registry.second" in str(caught.value)
    assert len(registry.patches) == 1


def test_constant_conflicts_with_a_replacement() -> None:
    registry = Registry()
    registry.constant("a.b:f", 1, why="w")
    with pytest.raises(PatchConflict):
        registry.replace("a.b:f", why="w")(first)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"devices": ("npu",)}, {"devices": ("cpu",)}),
        ({"upstream": "x"}, {"upstream": "y"}),
        ({"versions": "<0.15"}, {"versions": ">=0.15"}),
    ],
)
def test_replacements_that_never_meet_are_admitted(one: dict, other: dict) -> None:
    registry = Registry()
    registry.replace("a.b:f", why="w", **one)(first)
    registry.replace("a.b:f", why="w", **other)(second)
    assert len(registry.for_module("a.b")) == 2


def test_any_upstream_meets_every_upstream() -> None:
    registry = Registry()
    registry.replace("a.b:f", why="w")(first)
    with pytest.raises(PatchConflict):
        registry.replace("a.b:f", why="w", upstream="x")(second)


def test_wraps_never_conflict() -> None:
    registry = Registry()
    registry.replace("a.b:f", why="w")(first)
    registry.wrap("a.b:f", why="w")(first)
    registry.wrap("a.b:f", why="w")(second)
    assert [patch.kind for patch in registry.for_module("a.b")] == ["replace", "wrap", "wrap"]


def in_file(registry: Registry, file: str, **options: object) -> None:
    """Record an ``around`` in a file of that name."""
    source = "def record(registry, options):\n    registry.around('a.b:f', why='w', **options)(len)\n"
    space: dict = {"__name__": file}
    exec(compile(source, f"/adaptors/{file}.py", "exec"), space)  # a literal of this test
    space["record"](registry, options)


def files(registry: Registry) -> list[str]:
    return [Path(patch.file).stem for patch in in_order(registry.patches)]


@pytest.mark.parametrize("names", list(itertools.permutations(["one", "two", "three"])), ids="-".join)
def test_the_order_that_is_declared_does_not_depend_on_that_of_the_imports(names: tuple[str, ...]) -> None:
    registry, orders = Registry(), {"one": 3, "two": -1, "three": 0}
    for name in names:
        in_file(registry, name, order=orders[name])
    registry.replace("a.b:f", why="w")(first)
    assert files(registry) == ["test_registry", "two", "three", "one"]


def test_two_files_without_an_order_are_refused_and_told_what_to_write() -> None:
    registry = Registry()
    in_file(registry, "one", order=2)
    with pytest.raises(PatchConflict) as refused:
        in_file(registry, "two", order=2)
    told = str(refused.value)
    for part in (
        "a.b:f is patched by ",
        "the order of the two is not defined",
        "/adaptors/one.py:2",
        "/adaptors/two.py:2",
        "order=3",
    ):
        assert part in told
    assert len(registry.patches) == 1


def test_those_of_one_file_lie_as_they_stand_there() -> None:
    registry = Registry()
    for number in range(3):
        registry.around("a.b:f", why=str(number))(first)
    registry.wrap("a.b:f", why="3", order=-1)(second)
    registry.wrap("a.b:f", why="4")(second)
    assert [patch.why for patch in in_order(registry.patches)] == ["3", "0", "1", "2", "4"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"devices": ("npu",)}, {"devices": ("cpu", "cuda")}),
        ({"upstream": "x"}, {"upstream": "y"}),
        ({"versions": "<0.15"}, {"versions": ">=0.15"}),
    ],
)
def test_files_that_never_meet_need_no_order(one: dict, other: dict) -> None:
    registry = Registry()
    in_file(registry, "one", **one)
    in_file(registry, "two", **other)
    assert len(registry.patches) == 2


def test_an_adaptor_that_is_imported_again_conflicts_with_itself_as_little() -> None:
    registry = Registry()
    in_file(registry, "one", order=1)
    in_file(registry, "two")
    in_file(registry, "one", order=1)
    assert files(registry) == ["two", "one"]


@pytest.mark.parametrize("kind", ["replace", "constant", "watch"])
def test_what_calls_no_original_has_no_order(kind: str) -> None:
    with pytest.raises(ValueError, match="must not have an order, because it does not call the original"):
        Registry().add(make_patch(kind=kind, order=1))


def test_the_same_record_again_takes_its_own_place() -> None:
    registry = Registry()
    for _ in range(2):
        registry.wrap("a.b:f", why="w")(first)
        registry.constant("a.b:X", 1, why="w")
    assert len(registry.patches) == 2


def test_two_functions_of_one_name_are_two_records() -> None:
    registry = Registry()
    makes = []
    for line in ("", "\n"):
        scope: dict = {"__name__": "adaptor"}
        exec(compile(f"{line}def _(x): pass", "adaptor.py", "exec"), scope)
        makes.append(scope["_"])
    registry.replace("a.b:f", why="w")(makes[0])
    with pytest.raises(PatchConflict):
        registry.replace("a.b:f", why="w")(makes[1])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", ">=1", True),
        (">=0.12,<0.15", ">=0.15", False),
        (">=0.12,<=0.15", ">=0.15", True),
        (">0.15", "<=0.15", False),
        (">0.14", "<0.15", True),
        ("==0.16.*", ">=0.16.1", True),
        ("==0.15.*", "==0.16.*", False),
        ("!=0.16.1", "==0.16.1", False),
        ("<0.15", "<0.13", True),
        ("~=0.16.0", ">=0.17", False),
    ],
)
def test_overlap_of_versions(one: str, other: str, expected: bool) -> None:
    assert versions_overlap(one, other) is expected
    assert versions_overlap(other, one) is expected


def test_versions_admit_pre_releases_and_refuse_what_is_no_version() -> None:
    assert admits(">=0.15", "0.16.0rc0")
    assert not admits(">=0.17", "0.16.1")
    assert admits("", "not a version")
    assert not admits(">=0", "not a version")


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "a.b.f"},
        {"target": "a.b:"},
        {"target": "a b:f"},
        {"devices": ()},
        {"devices": ("tpu",)},
        {"why": " "},
        {"versions": "newest"},
    ],
)
def test_malformed_records_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"."):
        Registry().add(make_patch(**changes))


def test_reasons_to_skip() -> None:
    assert make_patch().reason_to_skip("cpu") is None
    assert make_patch().reason_to_skip("npu") == "for cpu, not npu"
    assert make_patch(condition=lambda: "apex is here").reason_to_skip("cpu") == "apex is here"


def test_a_patch_is_for_versions_of_an_upstream() -> None:
    assert make_patch(upstream="").is_for("any", "1.0")
    assert make_patch(upstream="a").is_for("a", "1.0")
    assert not make_patch(upstream="b").is_for("a", "1.0")
    assert not make_patch(upstream="a", versions="<1").is_for("a", "1.0")


def test_patches_that_are_not_kept_are_forgotten() -> None:
    registry = Registry()
    registry.replace("a.b:f", why="w")(first)
    registry.replace("a.c:f", why="w")(first)
    registry.keep(lambda patch: patch.module == "a.c")
    assert [patch.target for patch in registry.patches] == ["a.c:f"]


def test_records_know_where_they_come_from() -> None:
    registry = Registry()
    registry.constant("a.b:X", 1, why="w")
    registry.wrap("a.b:f", why="w")(first)
    constant, wrap = registry.patches
    assert constant.origin == wrap.origin.rpartition(".")[0] == __name__
    assert constant.where.startswith(__file__)


def without(name: str) -> Callable[[Any], Any]:
    """Return a wrap, as the helpers of adaptors do."""
    return lambda original: lambda *args: (name, *original(*args))


def test_two_wraps_of_one_helper_on_one_line_are_two_records() -> None:
    r = Registry()
    r.wrap("m.x:f", why="a")(without("a")); r.wrap("m.x:f", why="b")(without("b"))  # noqa: E702  # fmt: skip
    assert [patch.why for patch in r.patches] == ["a", "b"]


def test_wraps_of_a_loop_on_one_line_are_so_many_records() -> None:
    registry, ledger = Registry(), Ledger()
    for name in "abc":
        registry.wrap("m.x:f", why="the same for all")(without(name))
    original: Any = lambda: ()  # noqa: E731
    assert [patch.make(original)() for patch in registry.patches] == [("a",), ("b",), ("c",)]
    ledger.keep(registry.patches)
    assert len(ledger.rows) == 3
    ledger.row(registry.patches[1]).settle("applied")
    assert [row.state for row in ledger.rows] == ["pending", "applied", "pending"]


def test_records_of_one_line_for_other_upstreams_versions_or_devices_stay_apart() -> None:
    registry = Registry()
    meant = [{"upstream": "a"}, {"upstream": "b"}, {"versions": "<1"}, {"versions": ">=1"}]
    meant += [{"devices": ("cpu",)}, {"devices": ("npu",)}]
    for options in meant:
        registry.wrap("m.x:f", why="w", **options)(without)
    assert len(registry.patches) == len(meant)
    for name in ("<1", ">=1"):
        registry.constant("m.x:C", False, why="w", versions=name)
    assert len(registry.for_module("m.x")) == len(meant) + 2


ADAPTOR = """
def without(name):
    return lambda original: lambda *args: (name, *original(*args))

for name in "ab":
    registry.wrap("m.x:f", why="w")(without(name))
registry.constant("m.x:C", object(), why="w")

@registry.replace("m.x:g", why="w")
def g():
    return RUN
"""


def test_an_adaptor_that_is_imported_anew_takes_its_own_places() -> None:
    registry, ledger = Registry(), Ledger()
    for run in range(3):
        scope = {"__name__": "adaptor", "__spec__": ModuleSpec("adaptor", None), "registry": registry}
        exec(compile(ADAPTOR, "adaptor.py", "exec"), scope | {"RUN": run})
        ledger.keep(registry.patches)
        ledger.rows[0].settle("applied")
    assert [patch.target for patch in registry.patches] == ["m.x:f", "m.x:f", "m.x:C", "m.x:g"]
    assert [patch.make(lambda: ())() for patch in registry.patches[:2]] == [("a",), ("b",)]
    assert registry.patches[3].make() == 2
    assert [row.state for row in ledger.rows] == ["applied", "pending", "pending", "pending"]


def test_constants_of_a_loop_on_one_line_conflict() -> None:
    registry, refused = Registry(), []
    for value in (object(), object()):
        try:
            registry.constant("m.x:C", value, why="w")
        except PatchConflict:
            refused.append(value)
    assert len(refused) == len(registry.patches) == 1


def test_the_origin_is_who_asked_and_not_the_helper() -> None:
    registry, ledger = Registry(), Ledger()
    scope = {"__name__": "helper"}
    exec("def without(flag):\n    return lambda original: original", scope)
    helped: Any = scope["without"]
    registry.wrap("m.x:f", why="w")(helped("a"))
    registry.wrap("m.x:f", why="w")(partial(helped, "b"))
    registry.around("m.x:f", why="w")(first)
    ledger.keep(registry.patches)
    assert [row["origin"] for row in json.loads(ledger.json())["patches"]] == [
        __name__,
        __name__,
        f"{__name__}.first",
    ]
    assert {Path(patch.where.rpartition(":")[0]) for patch in registry.patches} == {Path(__file__)}


def test_the_cure_of_an_upstream_bug_says_until_when() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="must name the version that fixes it"):
        registry.around("m.x:f", why="w", upstream_bug=True)(first)
    registry.around("m.x:f", why="w", upstream_bug=True, until="0.17")(first)
    assert (registry.patches[0].upstream_bug, registry.patches[0].until) == (True, "0.17")
