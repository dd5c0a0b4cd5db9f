"""A command that waits for a person, for longer than a run may stand still, is there when one comes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.support import tiny, warm

pytest.importorskip("megatron.core")
QUESTION = ">>> "


def _read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return what a process prints up to some words, or to its end."""
    said = ""
    while not said.endswith(words) and (letter := process.stdout.read(1)):
        said += letter
    return said


@pytest.mark.parametrize("processes", [1, 2])
def test_a_conversation(dataset: Path, tmp_path: Path, processes: int) -> None:
    folder = str(tmp_path / "saved")
    flags = [*tiny.flags_for(dataset), *"--train-iters 1 --eval-iters 0 --save".split(), folder]
    assert tiny.run("pretrain", *flags).returncode == 0
    command = tiny.command(
        *("generate", "--load", folder, "--num-samples", "0", "--num-tokens", "2", "--greedy"),
        processes=processes,
    )
    env = tiny.environment() | {"MEGATRON_NPU_WATCHDOG": "5"}  # seconds: with less a busy machine is a hang
    command, env = warm.ready(command, env, warm.DRIVER)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        _read_until(process, QUESTION)
        time.sleep(7)
        process.stdin.write("1 2\n")
        process.stdin.flush()
        said = _read_until(process, QUESTION)
        assert said.startswith("1 2 "), (said, process.poll())
        _, err = process.communicate("stop\n", timeout=LONGEST)
        assert process.returncode == 0, err
    finally:
        process.kill()
