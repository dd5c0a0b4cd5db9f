"""A disk that is slow, or does not answer, while the last checkpoint of ``--async-save`` is written to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.support import tiny, warm

pytest.importorskip("megatron.core")
# The command, whose forks take longer to bring a shard to the disk than a run may stand still. Bytes go out
# meanwhile, or none do.
DISK = """
import os, runpy, sys, time
os.setpgrp()
with open(sys.argv.pop(1), "w") as file:
    print(os.getpid(), file=file)
_fsync, _main = os.fsync, os.getpid()
def fsync(number):
    if os.getpid() != _main and os.readlink(f"/proc/self/fd/{number}").endswith(".distcp"):
        with open("/dev/null", "wb", buffering=0) as out:
            for _ in range(SECONDS * 4):
                out.write(bytes(BYTES))
                time.sleep(0.25)
    _fsync(number)
os.fsync = fsync
runpy.run_module("megatron_npu", run_name="__main__", alter_sys=True)
"""
LIMIT = 3  # seconds


def start(dataset: Path, folder: Path, *, seconds: int, size: int) -> subprocess.Popen[bytes]:
    """Train two iterations and save, with a disk that takes so long for a shard and writes so many bytes."""
    folder.mkdir()
    script = folder / "slow.py"
    script.write_text(DISK.replace("SECONDS", str(seconds)).replace("BYTES", str(size)))
    env = tiny.environment() | {"MEGATRON_NPU_WATCHDOG": str(LIMIT)}
    flags = [*tiny.flags_for(dataset), *"--train-iters 2 --eval-iters 0 --async-save --save".split()]
    words = ["pretrain", *flags, str(folder / "saved")]
    command = [sys.executable, str(script), str(folder / "number"), *words]
    command, env = warm.ready(command, env, warm.DRIVER)
    with (folder / "said").open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def runs(dataset: Path, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Both runs, which wait at the same time; their writers may be left over."""
    disks = {"slow": (3 * LIMIT, 100_000), "dead": (LONGEST, 0)}
    started = {
        name: start(dataset, folder / name, seconds=seconds, size=size)
        for name, (seconds, size) in disks.items()
    }
    yield started
    for name, process in started.items():
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((folder / name / "number").read_text()), signal.SIGKILL)


def test_the_last_save_to_a_slow_one_is_no_hang(
    runs: dict[str, subprocess.Popen[bytes]], folder: Path
) -> None:
    code, said = runs["slow"].wait(LONGEST), (folder / "slow" / "said").read_text()
    assert code == 0, said
    assert "the run is stopped" not in said
    assert (folder / "slow" / "saved" / "iter_0000002" / "arguments.json").is_file()


def test_the_last_save_to_one_that_does_not_answer_is_named(
    runs: dict[str, subprocess.Popen[bytes]], folder: Path
) -> None:
    code, said = runs["dead"].wait(LONGEST), (folder / "dead" / "said").read_text()
    assert code == 1, said
    told = (
        rf"the run is stopped: it has made no progress for {LIMIT} s; "
        r"it is saving, at \S+:\d+ in \w+ \(step 2\)"
    )
    file = r"and makes no progress with \S+\.distcp \([\d,]+ bytes\)"
    assert re.search(rf"^megatron_npu: {told}, {file}$", said, re.MULTILINE), said
