"""`pretrain` with the switches of acceleration: the losses and gradient norms of the plain run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end import tiny

WORKER = Path(__file__).parent / "switch_worker.py"
FLAGS = "--attention-dropout 0 --hidden-dropout 0 --train-iters 20 --log-interval 1 --eval-iters 1 --no-plot"
FP32 = {
    "zero-1": "--zero-1-memory-optimization",
    "zero-2": "--zero-2-memory-optimization",
    "zero-3": "--zero-3-memory-optimization",
    "fsdp": "--fsdp-memory-optimization --checkpoint-activations --fused-ops",
}
HALF = {
    "bf16": "--mixed-precision --checkpoint-activations",
    "bf16-zero-2": "--mixed-precision --zero-2-memory-optimization",
    "bf16-zero-3": "--mixed-precision --zero-3-memory-optimization --checkpoint-activations",
    "bf16-fsdp": "--mixed-precision --fsdp-memory-optimization",
    "fp16": "--mixed-precision fp16 --initial-loss-scale 1024 --zero-1-memory-optimization",
}
LIMITS = dict.fromkeys(FP32, (1e-5, 1e-4)) | dict.fromkeys(HALF, (1e-2, 0.15))  # of losses, of norms
CASES = {"plain": "", **FP32, **HALF}
ALONE = ("plain", "zero-1", "zero-3", "bf16", "fp16")  # the others are the same where nothing is shared


def curves(
    folder: Path, dataset: Path, processes: int, names=tuple(CASES)
) -> dict[str, tuple[list[float], list[float]]]:
    """Train all cases in one start; return the losses, the last of validation, and the gradient norms."""
    cases = folder / "cases.json"
    cases.write_text(json.dumps({name: words.split() for name, words in CASES.items() if name in names}))
    launcher = tiny.torchrun(processes) if processes > 1 else []
    flags = [*tiny.flags_for(dataset), *FLAGS.split()]
    done = tiny.run_python([sys.executable, *launcher, str(WORKER), str(cases), str(folder), *flags])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for name in names:
        rows = tiny.rows(folder / name)
        valid = tiny.rows(folder / name, "validation")
        losses = [row["loss"] for row in [*rows, *valid]]
        found[name] = losses, [row["grad_norm"] for row in rows]
    return found


@pytest.fixture(scope="module")
def plain(dataset, tmp_path_factory):
    return curves(tmp_path_factory.mktemp("one"), dataset, 1, ALONE)


@pytest.fixture(scope="module")
def two(dataset, tmp_path_factory):
    return curves(tmp_path_factory.mktemp("two"), dataset, 2)


def check(found, expected, name):
    losses, norms = found
    assert len(losses) == 21
    assert expected[0][0] - expected[0][19] > 0.1, "the run must learn, or curves say nothing"
    of_loss, of_norm = LIMITS[name]
    assert losses == pytest.approx(expected[0], rel=of_loss)
    assert norms == pytest.approx(expected[1], rel=of_norm)  # Adam would hide gradients twice as large


@pytest.mark.parametrize("name", ALONE[1:])
def test_one_process_trains_as_without_the_switches(plain, name):
    check(plain[name], plain["plain"], name)


@pytest.mark.parametrize("name", LIMITS)
def test_two_processes_train_as_one_without_the_switches(plain, two, name):
    check(two[name], plain["plain"], name)
