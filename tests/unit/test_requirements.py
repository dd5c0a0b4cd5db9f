"""docs/records/requirements.md: every row of the requirement documents, and tests that exist for each."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.support import held_rows

PAGE = ROOT / "docs" / "records" / "requirements.md"
TYPED = ROOT / "benchmarks" / "results" / "requirements" / "typed.json"  # which rows somebody typed or read
# one of these is what a "partly" wants
WANTED = re.compile(
    r"hardware|GPU|NPU|A100|cards|chip|Ascend machine|machine with|network|weights|docker|cannot be had"
)
ROWS = {"003": 54, "000": 21, "002": 25, "004": 20, "001": 95}  # rows of each document


class Row(NamedTuple):
    """A line of a table: its number, what is asked for, and the rest as the table's head says."""

    number: str
    what: str
    state: str
    where: str
    held_by: str
    missing: str


def rows() -> list[Row]:
    lines = re.findall(r"^\| (\d{3}-\d+ \|.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [Row(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line))) for line in lines]


@functools.cache
def functions(file: str) -> set[str]:
    """Return the names of the functions in a file of tests."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once_and_in_order() -> None:
    asked = [f"{document}-{number}" for document, last in ROWS.items() for number in range(1, last + 1)]
    assert [row.number for row in rows()] == asked


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.number)
def test_a_row_is_held_by_tests_that_exist(row: Row) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.held_by)
    assert row.held_by.count("::") == len(named)
    for file, function in named:
        assert (ROOT / file).is_file(), f"{row.number} names {file}"
        assert function in functions(file), f"{row.number} names {function}, which is not in {file}"
    assert named, f"{row.number}: no test holds it"
    assert row.what
    assert row.where, f"{row.number}: where is it?"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.number)
def test_what_is_missing_is_said_where_something_is(row: Row) -> None:
    assert row.state in ("yes", "yes, changed", "partly", "no")
    assert bool(row.missing) == (row.state != "yes"), f"{row.number} is {row.state!r}: {row.missing!r}"


def test_a_partly_needs_what_cannot_be_had_here() -> None:
    assert [row.number for row in rows() if row.state == "partly" and not WANTED.search(row.missing)] == []
    assert not [row for row in rows() if row.state == "no"]


def test_the_page_counts_what_was_typed() -> None:
    typings = json.loads(TYPED.read_text(encoding="utf-8"))["typings"]
    typed = {number for one in typings for number in one["typed"]}
    read = {number for one in typings for number in one["read"]} - typed  # some were read first, then typed
    everything = [row.number for row in rows()]
    assert typed | read == set(everything)
    states = Counter(row.state for row in rows() if row.number in typed)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words in (
        f"{len(typed)} of the {len(everything)} rows were typed",
        f"{states['yes']} rows do it verbatim, {states['yes, changed']} with what their last column names, "
        f"{states['partly']} in part",
        f"The other {len(read)} rows were read",
    ):
        assert words in text
    for one in typings:
        assert one["commit"] in text
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d", one["date"])


def test_the_suite_says_which_named_tests_ran(tmp_path: Path) -> None:
    """Of parameters the worst counts, and one that ran before those that were skipped."""
    page = "| 001-1 | x | yes | y | `tests/a.py::test_one`, `tests/b.py::test_two` |  |\n" * 2
    page += "| 001-3 | x | yes | y | `tests/c.py::test_three`, `tests/c.py::test_four` |  |"
    reports = {
        "passed": ["tests/a.py::test_one[x]", "tests/c.py::test_three", "tests/z.py::test_other"],
        "skipped": ["tests/a.py::test_one[y]", "tests/b.py::test_two"],
        "failed": ["tests/c.py::test_three"],
    }
    found = held_rows.outcomes(held_rows.named(page), reports)
    assert held_rows.summary(page, found) == [
        "of the 4 tests that docs/records/requirements.md names, in this run: 1 passed, 1 failed, 1 skipped",
        "  skipped: tests/b.py::test_two (rows 001-1, 001-1)",
        "  failed: tests/c.py::test_three (rows 001-3)",
    ]
    held_rows.record(tmp_path / "rows.json", found)
    assert json.loads((tmp_path / "rows.json").read_text())["tests/a.py::test_one"] == "passed"
    assert held_rows.summary(page, {}) == []
