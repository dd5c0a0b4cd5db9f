"""What trials have found, as a table: a row each, and what no one has noticed at the end."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Outcome(NamedTuple):
    """One trial.

    Attributes:
        kind: of what was done.
        what: exactly.
        noticed: how; empty: by no one, or it was harmful.
    """

    kind: str
    what: str
    noticed: str


Trials = Callable[[Path, random.Random], Iterator[Outcome]]


def last_line(said: str) -> str:
    """Return the last line of what was said, cut to what a table has room for."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:100] if lines else ""


def run(trials: Trials, seed: int) -> int:
    """Make trials in a folder of their own and print them; return how many no one has noticed."""
    found = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        for outcome in trials(Path(folder), random.Random(seed)):
            found.append(outcome)
            print(f"| {outcome.kind} | {outcome.what} | {outcome.noticed or '**no one**'} |", flush=True)
    missed = [outcome for outcome in found if not outcome.noticed]
    print(f"{len(found)} trials; noticed by no one: {len(missed)}")
    return len(missed)


def main(trials: Trials, description: str | None) -> int:
    """Be a command that makes all trials."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    return run(trials, parser.parse_args().seed)
