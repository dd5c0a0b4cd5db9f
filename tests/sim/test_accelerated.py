"""Stacks of switches on two simulated NPUs against plain torch on the CPU, and the memory that each saves."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import LONGEST
from tests.support import stacks, train_script

ROOT = Path(__file__).resolve().parents[2]
SCHEMES = ("zero-1", "zero-2", "zero-3", "fsdp, cpu offload", "checkpoint activations")


@functools.cache
def plain(kind: str, steps: int, lora_rank: int = 0) -> list[float]:
    """Return the losses of plain torch in this process, made once."""
    return train_script.plain(kind, steps, lora_rank)


@pytest.fixture(scope="module")
def two_npus(simulated, tmp_path_factory):
    """Name of a run of stacks.py -> what two ranks made of it."""
    folder = tmp_path_factory.mktemp("stacks")
    program = [sys.executable, str(ROOT / "tests" / "support" / "stacks.py"), str(folder), "npu"]
    done = simulated(*program, timeout=LONGEST, MEGATRON_NPU_SIM_DEVICES="2")
    assert done.returncode == 0, done.stdout[-4000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    return found[0]


def check(losses, expected, precision=None):
    assert isinstance(losses, list), losses
    torch.testing.assert_close(losses, expected, rtol=1e-2 if precision else 1e-5, atol=0)


@pytest.mark.parametrize("words", stacks.on_npu(), ids=lambda words: stacks.title("", words))
def test_stacks(two_npus, words):
    expected = plain("user", stacks.FEW, words.get("lora_rank", 0))
    check(two_npus[stacks.title("user", words)], expected, words.get("mixed_precision"))


@pytest.mark.parametrize(("kind", "words"), stacks.LONG_ON_NPU, ids=str)
def test_more_steps(two_npus, kind, words):
    check(two_npus[stacks.title(kind, words)], plain(kind, stacks.STEPS), words.get("mixed_precision"))


def test_resumed_with_another_sharding_and_offloaded(two_npus):
    check(two_npus[f"resumed {' '.join(stacks.RESUMED[0])}"], plain("bert", 6))


def test_ranks_are_those_of_the_devices_that_are_listed(simulated):
    """In a process of its own from the start: torch_npu counts devices when torch is imported."""
    script = ROOT / "tests" / "finetune" / "scripts" / "slow.py"
    flags = f"--user-script {script} --epochs 1 --micro-batch-size 3 --global-batch-size 4".split()
    start = ["env", sys.executable, "-m", "megatron_npu", "train", *flags]
    done = simulated(*start, MEGATRON_NPU_SIM_DEVICES="4", CUDA_VISIBLE_DEVICES="1,3")
    assert done.returncode == 2
    assert (
        "--global-batch-size must be a multiple of --micro-batch-size 3 x 2 data-parallel ranks ="
        in done.stdout
    )


def test_devices_that_are_listed_but_do_not_exist_are_an_error(simulated, tmp_path):
    """A run on the CPU in their place would go unnoticed."""
    script = tmp_path / "mine.py"
    script.write_text("import torch\nprint(torch.ones(2).cuda().device)\n")
    start = [sys.executable, "-m", "megatron_npu", "run", "--redirect", str(script)]
    done = simulated("env", *start, MEGATRON_NPU_SIM_DEVICES="2", CUDA_VISIBLE_DEVICES="4,5")
    assert done.returncode == 2
    assert "selects the NPUs 4,5, but this machine has no such NPUs. List only existing NPUs" in done.stdout
    hidden = simulated("env", *start, MEGATRON_NPU_SIM_DEVICES="2", CUDA_VISIBLE_DEVICES="-1")
    assert hidden.stdout.splitlines()[-1] == "cpu"


@pytest.fixture(scope="module")
def memory(simulated, tmp_path_factory):
    """Scheme -> bytes of a rank of two, measured and by arithmetic."""
    output = tmp_path_factory.mktemp("memory") / "rows.json"
    command = [str(ROOT / "benchmarks" / "train_memory.py"), "--ranks", "2", "--layers", "5"]
    options = ["--schemes", *SCHEMES, "--output", str(output)]
    done = simulated(sys.executable, *command, *options, timeout=LONGEST, MEGATRON_NPU_SIM_DEVICES="2")
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(output.read_text())["2"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_is_saved_as_arithmetic_says(memory, scheme):
    row = memory[scheme]
    assert row["ratio"] == pytest.approx(1, abs=0.1), row
    assert row["saved_ratio"] == pytest.approx(1, abs=0.1), row
