"""Record which of the tests named in docs/records/requirements.md ran, and their outcomes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_ROW = re.compile(r"^\| (\d{3}-\d+) \|.*$", re.M)
_NAMED = re.compile(r"`(tests/[\w/]+\.py::test_\w+)`")
_WORST = ("failed", "passed", "skipped")  # of a test with parameters: one that failed, else one that ran


def named(page: str) -> dict[str, list[str]]:
    """Return the tests that a page of requirements names, each with its table rows."""
    tests: dict[str, list[str]] = {}
    for match in _ROW.finditer(page):
        for test in _NAMED.findall(match.group(0)):
            tests.setdefault(test, []).append(match.group(1))
    return tests


def outcomes(tests: Iterable[str], reports: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the outcomes of the named tests that were part of this run.

    Args:
        tests: the named tests.
        reports: the ids of tests by outcome; a test with parameters has an id for each.
    """
    wanted, found = set(tests), dict[str, str]()
    for outcome in reversed(_WORST):
        for identity in reports.get(outcome, ()):
            test = identity.partition("[")[0]
            if test in wanted:
                found[test] = outcome
    return found


def summary(page: str, found: Mapping[str, str]) -> list[str]:
    """Return lines about the named tests of this run: counts, and the names of those that did not pass."""
    if not found:
        return []
    rows = named(page)
    counts = {outcome: sum(one == outcome for one in found.values()) for outcome in _WORST}
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    lines = [f"of the {len(rows)} tests that docs/records/requirements.md names, in this run: {told}"]
    for test, outcome in sorted(found.items()):
        if outcome != "passed":
            lines.append(f"  {outcome}: {test} (rows {', '.join(rows[test])})")
    return lines


def record(file: Path, found: Mapping[str, str]) -> None:
    """Write the outcomes as JSON."""
    file.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
