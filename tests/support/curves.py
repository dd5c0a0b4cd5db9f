"""Train several runs of the driver in one start of its processes, which takes longer than most runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import tiny

WORKER = Path(__file__).resolve().parents[1] / "distributed" / "worker.py"


@dataclass(frozen=True)
class Curve:
    """The values that one run has logged.

    Attributes:
        rows: the rows of the iterations, followed by those of the evaluations.
        sizes: the number of all parameters, of those other than embeddings, and of active ones.
        first_layer: the norm of each first gradient of the first layer, by the parameter's name; empty if the
            gradients are not those of Megatron's DDP.
    """

    rows: list[dict]
    sizes: dict[str, int]
    first_layer: dict[str, float]

    def of(self, name: str) -> list[float]:
        """Return a column of the log."""
        return [row[name] for row in self.rows if name in row]

    def losses(self) -> list[float]:
        """Return the loss of each iteration."""
        return [row["loss"] for row in self.rows if row["event"] == "train"]


def command(folder: Path, flags: list[str], cases: Mapping[str, str], processes: int) -> list[str]:
    """Return the command-line words, to follow ``python``, that run all cases one after another."""
    listed = folder / "cases.json"
    listed.write_text(json.dumps({name: words.split() for name, words in cases.items()}))
    launcher = tiny.torchrun(processes) if processes > 1 else []
    return [*launcher, str(WORKER), str(listed), str(folder), *flags]


def read(folder: Path, name: str) -> Curve:
    """Return the results that the run of a case has left."""
    log = folder / f"{name}.jsonl"
    noted = json.loads((folder / f"{name}.json").read_text())
    return Curve([*tiny.rows(log), *tiny.rows(log, "validation")], noted["sizes"], noted["first_layer"])


def run(
    folder: Path,
    flags: list[str],
    cases: Mapping[str, str],
    processes: int = 1,
    env: dict[str, str] | None = None,
) -> str:
    """Train every case with ``flags`` and the words of the case, and return the printed output.

    The words may specify a log other than the one in ``folder``.
    """
    folder.mkdir(exist_ok=True)
    done = tiny.run_python([sys.executable, *command(folder, flags, cases, processes)], env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout


def train(folder: Path, flags: list[str], cases: Mapping[str, str], processes: int = 1) -> dict[str, Curve]:
    """Train every case in the same way as ``run``, and return the curves by name."""
    run(folder, flags, cases, processes)
    return {name: read(folder, name) for name in cases}


def begin_with(start: Path) -> list[str]:
    """Return the flags of a run that starts from the weights of a checkpoint."""
    return ["--load", str(start), "--finetune"]


def from_one_start(start: Path, cases: Mapping[str, str], common: str = "") -> dict[str, str]:
    """Return a case that saves the initial weights, and the cases that start from these weights.

    Args:
        start: the folder for the weights, whose name is also the name of the first case.
        cases: the words of each case, by name.
        common: the words that all cases share.
    """
    load = " ".join(begin_with(start))
    saving = {start.name: f"{common} --train-iters 0 --save {start}"}
    return saving | {name: f"{common} {words} {load}" for name, words in cases.items()}


def deviation(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(values) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
