"""Every stack of switches against plain torch: one rank in this process, two of gloo in their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_npu.options.switches import Switches
from tests.conftest import LONGEST
from tests.support import processes, stacks, train_script

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CPU = torch.device("cpu")
TOLERANCE = {None: 1e-5, "bf16": 1e-2, "fp16": 1e-2}


@functools.cache
def plain(kind: str, steps: int, lora_rank: int = 0) -> list[float]:
    """Return the losses of plain torch in this process, made once."""
    return train_script.plain(kind, steps, lora_rank)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Name of a run of stacks.py -> what two ranks made of it."""
    folder = tmp_path_factory.mktemp("stacks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT.parents[1])}
    command = [sys.executable, str(SUPPORT / "stacks.py"), str(folder), "cpu"]
    done = processes.run(
        command, env=environment, timeout=LONGEST, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    return found[0]


def check(losses, expected, precision=None):
    assert isinstance(losses, list), losses
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE[precision], atol=0)


@pytest.mark.parametrize("words", stacks.on_one_rank(), ids=lambda words: stacks.title("", words))
def test_one_rank(words):
    losses = train_script.run("user", Switches(**words), stacks.FEW, CPU)
    check(losses, plain("user", stacks.FEW, words.get("lora_rank", 0)), words.get("mixed_precision"))


@pytest.mark.parametrize("words", stacks.on_two_ranks(), ids=lambda words: stacks.title("", words))
def test_two_ranks(two_ranks, words):
    expected = plain("user", stacks.FEW, words.get("lora_rank", 0))
    check(two_ranks[stacks.title("user", words)], expected, words.get("mixed_precision"))


@pytest.mark.parametrize(("kind", "words"), stacks.LONG, ids=lambda value: str(value))
def test_more_steps_of_two_ranks(two_ranks, kind, words):
    expected = plain(kind, stacks.STEPS, words.get("lora_rank", 0))
    assert expected[0] - expected[-2] > 5e-3 * expected[0]  # on the same batch: it learns, gradients matter
    check(two_ranks[stacks.title(kind, words)], expected, words.get("mixed_precision"))


def test_zero_1_is_bitwise_data_parallel(two_ranks):
    assert two_ranks["bert sharding=zero-1"] == two_ranks["bert"]


@pytest.mark.parametrize("sharding", stacks.READY)
def test_an_optimizer_of_the_users(two_ranks, sharding):
    check(two_ranks[f"ready {sharding}"], plain("user", stacks.FEW))


@pytest.mark.parametrize("pair", stacks.RESUMED)
def test_resumed_with_another_sharding(two_ranks, pair):
    check(two_ranks[f"resumed {' '.join(pair)}"], plain("bert", 6))


@pytest.mark.parametrize("kind", ["bert dropout", "user dropout"])
def test_dropout_is_the_same_when_activations_are_computed_again(kind):
    again = train_script.run(kind, Switches(checkpoint_activations=True), 5, CPU)
    assert again == train_script.run(kind, Switches(), 5, CPU)
    assert again != plain(kind.split()[0], 5)
