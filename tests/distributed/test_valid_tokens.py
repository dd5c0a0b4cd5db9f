"""Micro-batches, ranks and parts of sequences with unlike numbers of tokens that count: the same numbers.

The reference is the whole global batch at once on one process, where every mean is over all of its tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_npu.data.preprocessing import indexed_dataset
from tests.support import curves, on_version, tiny
from tests.support.curves import deviation

VERSION = "0.19.2"  # since 0.17 the gradient of further tokens was wrong, too
MODEL = (
    "--position-embedding-type rope --mtp-num-layers 2 --eod-mask-loss --train-iters 2 --global-batch-size 8 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
PER_TOKEN = "--calculate-per-token-loss --micro-batch-size"
ONE = {"per token": f"{PER_TOKEN} 8", "plain": "--micro-batch-size 8", "micro-batches": f"{PER_TOKEN} 1"}
TWO = {
    "dp2": f"{PER_TOKEN} 2",
    "tp2": f"{PER_TOKEN} 4 --tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": f"{PER_TOKEN} 2 --pipeline-model-parallel-size 2",
    "cp2": f"{PER_TOKEN} 4 --context-parallel-size 2",
    "cp2 plain": "--micro-batch-size 8 --context-parallel-size 2",
}


def write_dataset(prefix: Path) -> Path:
    """Write documents of 40 tokens, of every third of which 9 in 10 are ends of a document."""
    generator = np.random.default_rng(0)
    with indexed_dataset.Writer(str(prefix), np.dtype(np.uint16)) as writer:
        for number in range(200):
            tokens = generator.integers(0, tiny.SIZE, 40).astype(np.uint16)
            tokens[generator.random(40) < (0.1 if number % 3 else 0.9)] = tiny.SIZE
            writer.add(tokens.tobytes(), np.array([40], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    return prefix


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, curves.Curve]:
    """Return the curves of all cases."""
    folder, environment = tmp_path_factory.mktemp("tokens"), tiny.environment_of(on_version.root_of(VERSION))
    flags = [*tiny.flags_for(write_dataset(folder / "text")), *MODEL.split()]
    start = folder / "start"
    curves.run(folder / "one", flags, curves.from_one_start(start, ONE), 1, environment)
    curves.run(folder / "two", [*flags, *curves.begin_with(start)], TWO, 2, environment)
    return {
        name: curves.read(folder / place, name)
        for place, cases in (("one", ONE), ("two", TWO))
        for name in cases
    }


@pytest.mark.parametrize("case", ["micro-batches", *TWO])
def test_numbers_are_those_of_the_whole_batch(found, case) -> None:
    whole, parts = found["plain" if case.endswith("plain") else "per token"], found[case]
    for name in ("loss", "grad_norm", "mtp_1_loss", "mtp_2_loss"):
        assert len(whole.of(name)) == 2
        assert deviation(parts.of(name), whole.of(name)) < 2e-6, name


def test_parts_of_sequences_in_the_oldest_version(tmp_path) -> None:
    """0.12 has another idea of whose tokens the loss is divided by: gradients were twice as large."""
    environment = tiny.environment_of(on_version.root_of("0.12.1"))
    words = f"{MODEL} --micro-batch-size 8".replace("--mtp-num-layers 2", "")
    flags = [*tiny.flags_for(write_dataset(tmp_path / "text")), *words.split()]
    curves.run(tmp_path / "one", flags, {"whole": ""}, 1, environment)
    curves.run(tmp_path / "two", flags, {"cp2": "--context-parallel-size 2"}, 2, environment)
    whole, parts = curves.read(tmp_path / "one", "whole"), curves.read(tmp_path / "two", "cp2")
    for name in ("loss", "grad_norm"):
        assert deviation(parts.of(name), whole.of(name)) < 2e-6, name
