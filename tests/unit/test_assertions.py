"""Assertions that can fail: none compares in its message, and none is of what is always true."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

_ALWAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.Lambda, ast.GeneratorExp)


def idle(text: str) -> list[int]:
    """Return the lines of a program's assertions that cannot fail as they are meant to."""
    asserts = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert))
    return [
        node.lineno
        for node in asserts
        if isinstance(node.msg, ast.Compare | ast.BoolOp)
        or (isinstance(node.test, _ALWAYS) and not (isinstance(node.test, ast.List) and not node.test.elts))
        or (isinstance(node.test, ast.Constant) and bool(node.test.value))
    ]


def test_every_assertion_can_fail() -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if (lines := idle(file.read_text(encoding="utf-8")))
    }
    assert not found


def test_such_assertions_are_found() -> None:
    assert idle("assert a, b == 1\nassert (a, b)\nassert True\nassert a == b, 'c'\nassert f'{a}'\n") == [
        1,
        2,
        3,
        5,
    ]
