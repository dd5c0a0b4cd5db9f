"""Runs that are interrupted, and two runs in one folder: one line, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGEST, wait_until
from tests.support import tiny, warm


@contextmanager
def started(*flags: str, seen: Path, text: str, forked: bool = False) -> Iterator[subprocess.Popen]:
    """Start a run; give it when ``text`` stands in ``seen``; end it.

    Where it is ``forked``, this is the client of a warm parent, and the run goes a little later than it.
    """
    command, env = tiny.command("pretrain", *flags), tiny.environment()
    if forked:
        command, env = warm.ready(command, env, warm.DRIVER)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        wait_until(lambda: seen.exists() and text in seen.read_text(), process, lambda: process.communicate())
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def endless(flags: Callable[..., list[str]], tmp_path: Path) -> list[str]:
    return flags("--save", tmp_path, "--train-iters", 100_000, "--eval-iters", 0)


def test_ctrl_c_is_one_line(endless: list[str], tmp_path: Path) -> None:
    saving = [*endless, "--save-interval", "2"]
    with started(*saving, seen=tmp_path / "metrics.jsonl", text='"iteration": 3') as process:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 130
    (line,) = [line for line in err.splitlines() if "Warning" not in line and "warn(" not in line]
    assert f"pretrain: interrupted; the last checkpoint in {tmp_path} is from iteration" in line
    assert not psutil.wait_procs(children, timeout=LONGEST)[1]
    assert not list(tmp_path.glob(".iter*"))


def test_ctrl_c_saves_where_the_run_was_told_so(endless: list[str], tmp_path: Path) -> None:
    saving = [*endless, "--exit-signal-handler"]
    with started(*saving, seen=tmp_path / "metrics.jsonl", text='"iteration": 2', forked=True) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, err
    assert json.loads((tmp_path / "summary.json").read_text())["ended_by"] == "signal"
    assert "stopping at iteration" in out


def test_a_second_run_in_one_folder_is_refused_and_a_killed_one_is_not_in_the_way(
    endless: list[str], flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    short = ["pretrain", *flags("--save", tmp_path, "--eval-iters", 0)]
    with started(*endless, seen=tmp_path / "metrics.jsonl", text='"iteration": 1') as process:
        second = tiny.run(*short)
        assert second.returncode == 2
        assert "another run is writing to --save" in second.stderr.splitlines()[-1]
        process.kill()
        process.wait()
    left = tmp_path / ".iter_0000007.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"torn")
    (tmp_path / "latest_checkpointed_iteration.txt.1.partial").write_text("7")
    third = tiny.run(*short)
    assert third.returncode == 0, third.stderr
    assert f"removed {left}" in third.stdout
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob(".*.partial"))


def test_sigterm_ends_lambada_with_one_line(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    """In the middle of the passages: no process, no file, and the exit code of the page."""
    saved, passages, results = tmp_path / "saved", tmp_path / "passages.jsonl", tmp_path / "out" / "results"
    results.parent.mkdir()
    assert (
        tiny.run("pretrain", *flags("--save", saved, "--train-iters", 1, "--eval-iters", 0)).returncode == 0
    )
    os.mkfifo(passages)
    asked = ["--load", str(saved), "--valid-data", str(passages), "--results", str(results)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        tiny.command("lambada", *asked), env=tiny.environment(), stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            with passages.open("w") as sent:  # opens when the command reads
                sent.write('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 30_000)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=LONGEST)
        finally:
            process.kill()
    assert process.returncode == 143
    assert [line for line in err.splitlines() if "Warning" not in line and "warn(" not in line] == [
        "megatron-npu lambada: terminated"
    ]
    assert "LAMBADA" not in out
    assert not list(results.parent.iterdir())
    assert not psutil.wait_procs(children, timeout=LONGEST)[1]


GPT = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
_BENCH = "bench --suite 3d --devices 2 --model 2x32x4 --seq-length 16 --vocab-size 256"


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["doctor"], signal.SIGTERM),
        (["doctor"], signal.SIGHUP),
        (
            [
                *"plan --devices 2 -- pretrain --train-iters 1 --micro-batch-size 1 --mock-data".split(),
                *GPT.split(),
            ],
            signal.SIGTERM,
        ),
        (_BENCH.split(), signal.SIGTERM),
        (_BENCH.split(), signal.SIGHUP),
    ],
    ids=["doctor", "doctor-hung-up", "plan", "bench", "bench-hung-up"],
)
def test_a_signal_ends_what_a_command_has_started(
    words: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    environment = tiny.environment() | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(tiny.command(*words), env=environment, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            wait_until(lambda: psutil.Process(process.pid).children(), process, process.communicate)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            _, err = process.communicate(timeout=LONGEST)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    rows = "; 0 of 7 rows were measured" if words == _BENCH.split() else ""
    assert err.splitlines()[-1] == f"megatron-npu {words[0]}: terminated{rows}"
    assert not [each for each in psutil.wait_procs(children, timeout=1)[1] if _computes(each)]
    assert not list(tmp_path.glob("megatron-npu-*"))


def _computes(process: psutil.Process) -> bool:
    """Return whether a process has not ended; the superuser's first process may be slow to notice its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
