"""A command that waits for a person, for longer than a run may stand still, is there when one comes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def asked(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, subprocess.Popen]]:
    """A conversation of one process and one of two, which have waited for an answer together."""
    folder = str(tmp_path_factory.mktemp("waiting") / "saved")
    flags = [*tiny.flags_for(dataset), *"--train-iters 1 --eval-iters 0 --save".split(), folder]
    assert tiny.run("pretrain", *flags).returncode == 0
    words = ("generate", "--load", folder, "--num-samples", "0", "--num-tokens", "2", "--greedy")
    env = tiny.environment() | {"MEGATRON_NPU_WATCHDOG": "5"}  # seconds: with less a busy machine is a hang
    pipe, running = subprocess.PIPE, {}
    for processes in (1, 2):
        command, env = warm.ready(tiny.command(*words, processes=processes), env, warm.DRIVER)
        running[processes] = subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
    for process in running.values():
        _read_until(process, QUESTION)
    time.sleep(7)
    yield running
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_conversation(asked: dict[int, subprocess.Popen], processes: int) -> None:
    process = asked[processes]
    process.stdin.write("1 2\n")
    process.stdin.flush()
    said = _read_until(process, QUESTION)
    assert said.startswith("1 2 "), (said, process.poll())
    _, err = process.communicate("stop\n", timeout=LONGEST)
    assert process.returncode == 0, err
