"""Replicas that go apart by one bit: found at the next comparison, with rank and parameter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, checkout
from tests.support import stock_core, tiny, warm

WORKER = Path(__file__).parent / "replicas_worker.py"
SCRIPT = tiny.ROOT / "tests" / "finetune" / "scripts" / "dropout.py"
FLAG = ["--check-weight-hash-across-dp-replicas-interval", "2"]


def run(processes: int, *command: object, **environment: str):
    launcher = tiny.torchrun(processes)
    argv = [sys.executable, *launcher, str(WORKER), *map(str, command)]
    return tiny.run_python(argv, {**tiny.environment(), **environment})


def told(done) -> str:
    """Return what the ranks have said of replicas; they have ended with exit code 1, without traceback."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1  # torchrun's own
    lines = [line for line in done.stderr.splitlines() if "differs between data-parallel ranks" in line]
    assert lines, done.stderr
    return lines[0]


def test_the_tensor_and_the_rank_that_is_alone_are_named() -> None:
    done = run(3, "weight")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("the weight ")]
    assert [line.split()[2] for line in said] == ["half", "bad", "flag"]
    for line in said:
        assert (
            "differs between data-parallel ranks: rank 1 differs from ranks 0, 2; other affected tensors: 1."
            in line
        )


def test_the_driver_ends_where_a_bit_has_flipped(dataset) -> None:
    pytest.importorskip("megatron.core")
    done = run(2, "gradient", "pretrain", *tiny.flags_for(dataset), *FLAG)
    line = told(done)
    assert "the gradient of embedding.word_embeddings.weight differs between data-parallel " in line
    assert "rank 0 and rank 1 differ" in line
    assert " the replicas are identical after iteration 2" in done.stdout
    assert "after iteration 4" not in done.stdout


def test_training_a_users_model_ends_there_too() -> None:
    flags = ["--user-script", SCRIPT, "--train-iters", 5, "--micro-batch-size", 4, *FLAG]
    done = run(2, "weight", "train", *flags)
    line = told(done)
    assert ": the weight " in line
    assert " the replicas are identical after iteration 2" in done.stdout


def test_stock_scripts_name_it(tmp_path) -> None:
    tree = checkout("megatron_core", "0.16.1")
    flags = ["--mock-data", *stock_core.FLAGS, *FLAG]
    argv = [sys.executable, *tiny.torchrun(2), WORKER, "weight", "run", tree / "pretrain_gpt.py", *flags]
    done = warm.run(
        [str(word) for word in argv],
        env={**tiny.environment(), "MEGATRON_LM_PATH": str(tree)},
        modules=warm.STOCK,
        tree=tree,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    line = told(done)
    assert "the weight embedding.word_embeddings.weight differs between data-parallel " in line
    assert "Weight hashes match after 2 iterations" in done.stdout
