"""A system that starts no more processes or threads, or has no room for their queues: one line."""

from __future__ import annotations

import errno
import gc
import multiprocessing.popen_fork
import os
from typing import Any

import pytest
from torch.utils.data import DataLoader

from megatron_npu.base.errors import LoaderWorkerError
from megatron_npu.commands import cli
from megatron_npu.devices import loader_workers


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("begun", [0, 1])
def test_a_reader_of_data_that_cannot_be_started(
    number: int, begun: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    launch, started = multiprocessing.popen_fork.Popen._launch, []

    def refuse(self: Any, process: Any) -> None:
        if len(started) == begun:
            raise OSError(number, os.strerror(number))
        started.append(process)
        launch(self, process)

    monkeypatch.setattr(multiprocessing.popen_fork.Popen, "_launch", refuse)
    loader_workers.begin()
    try:
        with pytest.raises(
            LoaderWorkerError, match=rf"cannot be started: {os.strerror(number)}\. .*--num-workers"
        ):
            iter(DataLoader([1, 2, 3], num_workers=2, multiprocessing_context="fork"))
        gc.collect()
    finally:
        loader_workers.end()
    assert not any(process.is_alive() for process in started)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),  # gloo's, in C++
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    ],
    ids=["threading", "gloo", "fork"],
)
def test_a_command_says_it_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["generate"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("megatron-npu generate: error: the system cannot start more processes or threads;")
    assert told.count("\n") == 1


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise RuntimeError("a defect")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["generate"])
