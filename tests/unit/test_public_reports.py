"""docs/records/public-reports.md: every report once, with tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.unit.test_requirements import functions

PAGE = ROOT / "docs" / "records" / "public-reports.md"
ROWS = re.findall(r"^\| (\d+): (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)


def test_every_report_is_there_once_and_in_order() -> None:
    assert [int(number) for number, _ in ROWS] == [*range(1, 24)]


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[number for number, _ in ROWS])
def test_a_report_is_held_by_tests_that_exist(number: str, row: str) -> None:
    _, _, here, right, held_by = (cell.strip() for cell in row.split(" | "))
    assert here in ("held", "fixed", "added")
    assert right
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held_by)
    assert named, f"report {number}: no test holds it"
    assert held_by.count("::") == len(named)
    for file, function in named:
        assert function in functions(file), f"report {number} names {function}, which is not in {file}"
