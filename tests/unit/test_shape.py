"""The house does not grow what it has lost: ceilings of what ``scripts/shape.py`` counts."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import shape

# A ceiling falls with what it counts. It rises for a function that would read worse in parts: a reviewer sees
# it here.
COMPLEX = 29
OWN_OF_MANY = 7
LONGEST = 95  # lines, with the docstring
GLOBAL = 3


@pytest.fixture(scope="module")
def functions():
    return shape.functions()


def test_complex_functions_do_not_become_more(functions):
    found = [f"{each.complexity} {each.key}" for each in shape.too_complex(functions)]
    assert len(found) <= COMPLEX, "split one, or say in a review why it reads better whole: " + ", ".join(
        found
    )


def test_own_signatures_of_many_parameters_do_not_become_more(functions):
    found = [f"{each.parameters} {each.key}" for each in shape.take_many(functions, is_given=False)]
    assert len(found) <= OWN_OF_MANY, "carry together what travels together: " + ", ".join(found)


def test_no_function_is_longer_than_the_longest(functions):
    longest = shape.longest(functions)[0]
    assert longest.lines <= LONGEST, longest.key


def test_names_of_modules_are_not_rebound_more_often():
    assert shape.rebound_names() <= GLOBAL


def test_every_signature_that_is_given_is_there_and_of_many(functions):
    many = {each.key for each in shape.take_many(functions, is_given=True)}
    assert not shape.GIVEN.keys() - many, "what is not there, or takes no more than others, needs no reason"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n    return 1", 1),
        ("def f(a):\n    if a:\n        return 1\n    elif not a:\n        return 2", 3),
        ("def f(a, b, c):\n    return a and b and c or 1", 4),
        ("def f(a):\n    return [x if x else y for x in a for y in x if y]", 4),
        ("def f():\n    def g(a):\n        return 1 if a else 2\n    return g", 2),
        ("def f(a):\n    for b in a:\n        try: b()\n        except ValueError: pass", 3),
    ],
    ids=["straight", "branches", "operands", "comprehension", "inside", "handler"],
)
def test_complexity_counts_what_parts_the_path(source, expected):
    assert shape.complexity(ast.parse(source).body[0]) == expected


def test_what_replaces_upstreams_functions_has_a_signature_that_is_given(tmp_path):
    many = ", ".join(f"p{number}" for number in range(8))
    (tmp_path / "__init__.py").touch()
    (tmp_path / "patches.py").write_text(
        f"_later = partial(around, why='')\n\n@replace('a:b')\ndef one({many}): ...\n\n"
        f"@_later('a:c')\ndef two({many}): ...\n\n@other\ndef three({many}): ...\n",
        encoding="utf-8",
    )
    found = shape.functions(tmp_path)
    assert {each.name for each in shape.take_many(found, is_given=True)} == {"one", "two"}
    assert [each.name for each in shape.take_many(found, is_given=False)] == ["three"]
    assert shape.table(tmp_path)["files"] == "2"
