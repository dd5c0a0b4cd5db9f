"""What a test did, in one rank and in a whole world."""

from __future__ import annotations

from dataclasses import dataclass, field

PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"
COLLECTION = "(collection)"  # stands for the tests of a file that cannot be imported


@dataclass
class Result:
    """One test in all ranks of its world: ``text`` says why it failed or was skipped."""

    outcome: str
    text: str = ""
    seconds: float = 0.0


@dataclass
class FileResult:
    """One file of tests: world size, wall seconds, and what each test did, by its name in the file."""

    file: str
    world: int
    seconds: float = 0.0
    tests: dict[str, Result] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.tests.values())


def merge(ranks: list[Result]) -> Result:
    """Return the outcome of a test from those of its ranks, in the order in which they came.

    One failure fails it, and the first counts: those after it are mostly of peers that lost their partner.
    A test that passes in some ranks and is skipped in others has passed.
    """
    seconds = max(rank.seconds for rank in ranks)
    for outcome in (FAILED, PASSED, SKIPPED):
        for rank in ranks:
            if rank.outcome == outcome:
                return Result(outcome, rank.text, seconds)
    raise ValueError([rank.outcome for rank in ranks])
