"""Checkpoints that are written while training goes on (``--async-save``)."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from typing import Any

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoints
from megatron_npu.pretrain.checkpoint.async_saves import AsyncSaves
from megatron_npu.pretrain.checkpoint.checkpoint_failures import UnsavedError
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints
from megatron_npu.pretrain.run import pretrain
from megatron_npu.pretrain.run.divergence import DivergedError

pytest.importorskip("megatron.core")
SAVING = "--save-interval 2 --async-save --no-plot --eval-iters 0".split()


def names(folder: Any) -> list[str]:
    """Return the checkpoints in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir() if "iter_" in path.name)


def test_a_checkpoint_has_its_name_when_all_of_it_is_written(train, tmp_path, monkeypatch, capsys) -> None:
    """Nobody looks whether it is, until the next one is to be written."""
    monkeypatch.setattr(AsyncSaves, "take_finished", lambda self: None)
    seen = {}

    def look(iteration: int, model: Any) -> None:
        seen[iteration] = names(tmp_path)

    summary = train("--save", tmp_path, *SAVING, on_gradients=look)
    assert [len(there) for there in seen.values()] == [0, 0, 1, 1, 2, 2]
    assert "iter_0000002" not in seen[3]
    assert "iter_0000002" in seen[5]
    assert "iter_0000004" not in seen[5]
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert summary.checkpoint == str(tmp_path / "iter_0000006")
    assert capsys.readouterr().out.count(" saved ") == 3


def killed() -> None:
    """End the process that writes, as the kernel does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_dies_ends_the_run(train, tmp_path, monkeypatch) -> None:
    begin = checkpoints.begin_async

    def with_death(*args: Any) -> Any:
        return begin(*args)._replace(async_fn=lambda *_, **__: killed())

    monkeypatch.setattr(checkpoints, "begin_async", with_death)
    with pytest.raises(UnsavedError, match="iteration 2"):
        train("--save", tmp_path, *SAVING)
    assert names(tmp_path) == []


def test_a_run_that_fails_leaves_nothing_half_written(train, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(AsyncSaves, "take_finished", lambda self: None)

    def fail(iteration: int, model: Any) -> None:
        if iteration == 4:
            raise DivergedError("no further")

    with pytest.raises(DivergedError):
        train("--save", tmp_path, *SAVING, on_gradients=fail)
    assert names(tmp_path) == []


def test_the_flag_is_of_no_use_without_a_folder(train, tmp_path) -> None:
    summary: pretrain.Summary = train("--async-save", "--no-plot", "--train-iters", "1", "--eval-iters", "0")
    assert summary.checkpoint is None


def test_sharded_weights_are_refused() -> None:
    args = Namespace(
        save_interval=None,
        save="folder",
        async_save=True,
        fully_sharded="torch",
        save_per_machine=False,
        save_keep_last=None,
        save_retain_interval=None,
    )
    with pytest.raises(UsageError, match="--async-save cannot be used with sharded weights"):
        logs_and_checkpoints.checkpoints(args)
