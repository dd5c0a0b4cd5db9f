"""Pipes that another user has put in the place of a file: nothing waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import config
from megatron_npu.data.tokenization import hf
from megatron_npu.pretrain.checkpoint import checkpoint_description, checkpoint_files
from megatron_npu.pretrain.report import history

ANOTHER = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pipe to another user")


def in_time(read: Callable[[], object]) -> object:
    """Return what a call returns or raises, unless it waits."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(read())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it waits"
    return found[0]


def test_a_pipe_in_a_folder_that_is_read_is_refused(tmp_path: Path) -> None:
    for name in (checkpoint_files.DESCRIPTION, config.NAME, "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    told = in_time(lambda: checkpoint_description._read(tmp_path))
    assert isinstance(told, UsageError)
    assert "is not a regular file" in str(told)
    assert isinstance(in_time(lambda: config.read(tmp_path)), UsageError)
    assert in_time(lambda: hf.read_object(tmp_path / config.NAME)) == {}
    assert in_time(lambda: history.Reader(tmp_path / "metrics.jsonl").update()) is False


@needs_root
@pytest.mark.parametrize("is_read", [False, True])
def test_nothing_is_written_into_a_pipe_of_another_user(is_read: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    os.chown(pipe, ANOTHER, ANOTHER)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    told = in_time(lambda: open(pipe, "ab", opener=files.own_opener))  # noqa: SIM115 (it is not opened)
    assert isinstance(told, PermissionError)
    assert "a pipe that another user has created" in str(told)
    if reader is not None:
        os.close(reader)


def test_a_pipe_of_one_s_own_is_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Timer(0.5, lambda: got.append(pipe.read_bytes())).start()
    got: list[bytes] = []
    with open(pipe, "wb", opener=files.own_opener) as stream:
        assert os.get_blocking(stream.fileno())
        stream.write(b"x" * 200_000)
    until = threading.Event()
    for _ in range(100):
        if got:
            break
        until.wait(0.1)
    assert got == [b"x" * 200_000]
