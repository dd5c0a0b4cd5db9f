"""What was recorded for one tree on one device, and how a run compares with it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from megatron_npu.base import files

from . import exclusions
from .results import COLLECTION, EXCLUDED, FAILED, PASSED, SKIPPED, FileResult, Result

FOLDER = Path(__file__).parent
_REASONED = (FAILED, EXCLUDED, SKIPPED)


def path_for(tree: str, device: str, te: str = "absent") -> Path:
    return FOLDER / (f"{tree}-{device}.json" if te == "absent" else f"{tree}-{device}-te-{te}.json")


@dataclass
class Baseline:
    """``files`` maps a file to its ranks, seconds, names of passed tests, and the others by reason.

    ``there`` is the number of test files in the tree, of which perhaps not all are recorded, ``folders`` the
    same by folder (empty in a baseline that was recorded before it was noted). ``te`` is what
    stood under TransformerEngine's names: nothing (``absent``), or our layers (``local``) for a second pass,
    in which only those tests ran that the first one excludes for want of them. ``recorded`` is the day and
    the commit of the last recording.
    """

    tree: str
    device: str
    there: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict] = field(default_factory=dict)
    te: str = "absent"
    folders: dict[str, int] = field(default_factory=dict)
    recorded: str = ""

    @classmethod
    def load(cls, tree: str, device: str, te: str = "absent") -> Baseline:
        """Return what was recorded; nothing where nothing was."""
        path = path_for(tree, device, te)
        return cls(**json.loads(path.read_text())) if path.is_file() else cls(tree, device, te=te)

    def save(self) -> None:
        command = ["git", "-C", str(FOLDER), "rev-parse", "--short=8", "HEAD"]
        git = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        self.recorded = f"{datetime.now(timezone.utc):%Y-%m-%d}, commit {git.stdout.strip() or 'unknown'}"
        self.files = dict(sorted(self.files.items()))
        files.write(path_for(self.tree, self.device, self.te), json.dumps(vars(self), indent=1) + "\n")

    def outcomes(self, file: str) -> dict[str, str]:
        """Return the recorded outcome of each test of a file."""
        entry = self.files.get(file, {})
        found = dict.fromkeys(entry.get(PASSED, []), PASSED)
        for outcome in _REASONED:
            found |= {name: outcome for names in entry.get(outcome, {}).values() for name in names}
        return found

    def wanting(self, reasons: set[str]) -> dict[str, list[str] | None]:
        """Return the tests that are excluded for one of the reasons, by file; None: all of a file."""
        found: dict[str, list[str] | None] = {}
        for file, entry in self.files.items():
            excluded = entry.get(EXCLUDED, {}).items()
            names = [name for reason, tests in excluded if reason in reasons for name in tests]
            if names:
                found[file] = None if COLLECTION in names else names
        return found

    def with_second_pass(self, second: Baseline) -> Baseline:
        """Return both passes in one: of a test that ran in both, what it did in the second."""
        merged = replace(self, files=dict(self.files))
        for file, entry in second.files.items():
            again = {*second.outcomes(file), COLLECTION}
            merged.files[file] = _joined(_without(self.files.get(file, {}), again), entry)
        return merged

    def totals(self, files: list[str] | None = None) -> dict[str, int]:
        """Return how many tests have each outcome, in some files or in all."""
        outcomes = [outcome for file in files or self.files for outcome in self.outcomes(file).values()]
        return {outcome: outcomes.count(outcome) for outcome in (PASSED, *_REASONED)}

    def reasons(self, outcome: str) -> dict[str, int]:
        """Return the reasons of an outcome with the number of their tests, most first."""
        counts: dict[str, int] = {}
        for entry in self.files.values():
            for reason, names in entry.get(outcome, {}).items():
                counts[reason] = counts.get(reason, 0) + len(names)
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _without(entry: dict, names: set[str]) -> dict:
    """Return an entry of a file without some of its tests."""
    left = {**entry, PASSED: [name for name in entry.get(PASSED, []) if name not in names]}
    for outcome in _REASONED:
        of_reason = entry.get(outcome, {}).items()
        left[outcome] = {why: [name for name in tests if name not in names] for why, tests in of_reason}
    return left


def _joined(first: dict, second: dict) -> dict:
    """Return two entries of a file that share no test as one."""
    joined = {"ranks": second["ranks"], "seconds": first.get("seconds", 0.0) + second["seconds"]}
    joined[PASSED] = first[PASSED] + second.get(PASSED, [])
    for outcome in _REASONED:
        reasons = first[outcome].keys() | second.get(outcome, {}).keys()
        parts = {why: first[outcome].get(why, []) + second.get(outcome, {}).get(why, []) for why in reasons}
        joined[outcome] = {why: names for why, names in parts.items() if names}
    return joined


def entry(result: FileResult, rules: list[exclusions.Rule], device: str) -> dict:
    """Return what a baseline keeps of a file's result."""
    kept: dict = {"ranks": result.world, "seconds": result.seconds}
    for name, test in result.tests.items():
        outcome, reason = judge(result.file, name, test, rules, device)
        if outcome == PASSED:
            kept.setdefault(PASSED, []).append(name)
        else:
            kept.setdefault(outcome, {}).setdefault(reason, []).append(name)
    return kept


def judge(file: str, name: str, test: Result, rules: list[exclusions.Rule], device: str) -> tuple[str, str]:
    """Return the outcome of a test with its exclusions, and the reason."""
    if test.outcome == FAILED:
        rule = exclusions.find(rules, f"{file}::{name}", test.text, device)
        if rule is not None:
            return EXCLUDED, rule.reason
    return test.outcome, test.text


@dataclass
class Comparison:
    """Tests that changed, by their full name, each with a reason."""

    regressions: dict[str, str] = field(default_factory=dict)
    new_failures: dict[str, str] = field(default_factory=dict)  # of tests that are not recorded
    gains: list[str] = field(default_factory=list)
    incomparable: dict[str, str] = field(default_factory=dict)


def compare(baseline: Baseline, results: list[FileResult], rules: list[exclusions.Rule]) -> Comparison:
    """Hold a run against the baseline.

    A regression is a test that passed and no longer does, or is gone from a file that was run. A test that is
    not recorded and fails without a rule that explains it is a new failure.
    """
    answer = Comparison()
    for result in results:
        before = baseline.outcomes(result.file)
        for name, test in result.tests.items():
            _compare_one(answer, f"{result.file}::{name}", before.get(name), test, rules, baseline.device)
        unread = answer.incomparable.get(f"{result.file}::{COLLECTION}")
        for name in before.keys() - result.tests.keys():
            if before[name] == PASSED and not unread:
                answer.regressions[f"{result.file}::{name}"] = "did not run"
    return answer


def _compare_one(
    answer: Comparison, test: str, before: str | None, now: Result, rules: list[exclusions.Rule], device: str
) -> None:
    if now.outcome == PASSED:
        if before in _REASONED:
            answer.gains.append(test)
        return
    rule = exclusions.find(rules, test, now.text, device)
    if rule is not None and rule.environment:
        answer.incomparable[test] = rule.reason
    elif before == PASSED:
        answer.regressions[test] = f"{now.outcome}: {now.text}"
    elif before is None and now.outcome == FAILED and rule is None:
        answer.new_failures[test] = now.text
