"""Tests that say nothing about the plug-in where they ran, each with a reason: ``exclusions.json``.

A rule names a reason and the tests it is for: by the text of their failure (``text``), or by file and name
(``test``, matched from its start), both regular expressions, both where both are given. It holds for a test
that failed; one that passes has passed, whatever the rules say. A rule with ``environment`` is about what
this machine lacks: such a failure is never a regression, because the baseline was taken elsewhere. Tests of a
rule with ``barred`` are not even started. A rule with ``te`` is of one pass alone: ``absent`` of the first,
where nothing has TransformerEngine's names, and its tests run a second time; ``local`` of that second pass.
A rule with ``ours`` is for an error that this package raises; a test compares its text with the source.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("exclusions.json")


@dataclass(frozen=True)
class Rule:
    """One reason; see the module's text."""

    reason: str
    text: str = ""
    test: str = ""
    devices: tuple[str, ...] = ()
    environment: bool = False
    barred: bool = False
    te: str = ""
    ours: bool = False

    def matches(self, test: str, text: str, device: str) -> bool:
        """Return whether the failure ``text`` of ``test`` (file and name) is one that this rule explains."""
        return (
            (not self.devices or device in self.devices)
            and bool(re.match(self.test, test))
            and bool(re.search(self.text, text))
        )


def load(path: Path = _FILE, te: str = "absent") -> list[Rule]:
    """Return the rules of a pass.

    Args:
        te: what stands under TransformerEngine's names in it: ``absent`` (nothing) or ``local`` (our layers).

    Raises:
        ValueError: a rule that would match every test.
    """
    rules = [
        Rule(**{**entry, "devices": tuple(entry.get("devices", ()))})
        for entry in json.loads(path.read_text())
    ]
    for rule in rules:
        if rule.matches("", "", next(iter(rule.devices), "cpu")):
            raise ValueError(f"the rule {rule.reason!r} matches everything")
    return [rule for rule in rules if rule.te in ("", te)]


def find(rules: list[Rule], test: str, text: str, device: str) -> Rule | None:
    """Return the first rule that explains a failure."""
    return next((rule for rule in rules if rule.matches(test, text, device)), None)


def barred(rules: list[Rule], file: str, device: str) -> dict[str, str]:
    """Return the expressions for names of tests that must not start in a file, each with its reason."""
    found = {}
    for rule in rules:
        place, _, name = rule.test.partition("::")
        if rule.barred and re.fullmatch(place, file) and (not rule.devices or device in rule.devices):
            found[name] = rule.reason
    return found


def wanting_layers(rules: list[Rule]) -> set[str]:
    """Return the reasons whose tests run a second time, with our layers under TransformerEngine's names."""
    return {rule.reason for rule in rules if rule.te == "absent"}
