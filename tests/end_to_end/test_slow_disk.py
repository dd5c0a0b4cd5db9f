"""A disk that is slow, or does not answer, while the last checkpoint of ``--async-save`` is written to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.support import tiny

pytest.importorskip("megatron.core")
# What each process runs at its start: to bring a shard to the disk takes longer than a run may stand still.
# Bytes go out meanwhile, or none do.
DISK = """
import os, time
_fsync, _main = os.fsync, os.getpid()
def fsync(number):
    if os.getpid() != _main and os.readlink(f"/proc/self/fd/{number}").endswith(".distcp"):
        with open("/dev/null", "wb", buffering=0) as out:
            for _ in range(SECONDS * 4):
                out.write(bytes(BYTES))
                time.sleep(0.25)
    _fsync(number)
os.fsync = fsync
"""
LIMIT = 3  # seconds


def run(dataset: Path, folder: Path, *, seconds: int, size: int) -> tuple[int, str]:
    """Train two iterations and save, with a disk that takes so long for a shard and writes so many bytes.

    Returns:
        The exit code of the run, whose writer may be left over, and what it has said.
    """
    hook = folder / "hook"
    hook.mkdir()
    text = DISK.replace("SECONDS", str(seconds)).replace("BYTES", str(size))
    (hook / "sitecustomize.py").write_text(text)
    env = tiny.environment() | {"MEGATRON_NPU_WATCHDOG": str(LIMIT)}
    env["PYTHONPATH"] = os.pathsep.join([str(hook), env["PYTHONPATH"]])
    flags = [*tiny.flags_for(dataset), *"--train-iters 2 --eval-iters 0 --async-save --save".split()]
    command = tiny.command("pretrain", *flags, str(folder / "saved"))
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        return process.wait(LONGEST), said.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_the_last_save_to_a_slow_one_is_no_hang(dataset: Path, tmp_path: Path) -> None:
    code, said = run(dataset, tmp_path, seconds=3 * LIMIT, size=100_000)
    assert code == 0, said
    assert "the run ends" not in said
    assert (tmp_path / "saved" / "iter_0000002" / "arguments.json").is_file()


def test_the_last_save_to_one_that_does_not_answer_is_named(dataset: Path, tmp_path: Path) -> None:
    code, said = run(dataset, tmp_path, seconds=LONGEST, size=0)
    assert code == 1, said
    told = rf"the run ends: it has not moved for {LIMIT} s: it is saving, at \S+:\d+ in \w+ \(step 2\)"
    file = r"and does not get on with \S+\.distcp \([\d,]+ bytes\)"
    assert re.search(rf"^megatron_npu: {told}, {file}$", said, re.MULTILINE), said
