"""The processes that write checkpoints: killed ones end the save, and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_npu.adaptors.megatron_core.checkpoints import persistent_worker
from megatron_npu.adaptors.megatron_core.checkpoints.checkpoint_writers import ResultsFile, results_or_reason

LARGE = b"x" * 1_000_000  # more than a pipe holds


def _save(folder: Path) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor, save
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    tensors = {name: ShardedTensor.from_rank_offsets(name, torch.arange(6.0)) for name in ("one", "two")}
    save(tensors, str(folder), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2))


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(transforms: Any, number: int, bucket: Any, results: Any, *_: Any) -> None:
    results.put((number, OSError("the disk is gone")))


@pytest.mark.parametrize(
    ("writer", "reason"), [(_die, "was killed by SIGKILL (out of memory?)"), (_fail, "the disk is gone")]
)
def test_a_writer_that_dies_or_fails_ends_the_save(
    single_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Callable, reason: str
) -> None:
    """Stock waits for a killed one for ever."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.api import CheckpointException

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(writer))
    with pytest.raises(CheckpointException) as caught:
        _save(tmp_path)
    assert reason in str(caught.value)


def test_the_process_of_a_whole_save_that_dies_is_named() -> None:
    """Of 0.12 and 0.13; found by the campaign on 0.12.1."""

    def upstream(results: ResultsFile) -> object:
        try:
            found = results.get_nowait()
        except queue.Empty:
            raise RuntimeError("results_queue should not be empty") from None
        if isinstance(found, Exception):
            raise RuntimeError(f"Worker failure: {found}") from found
        return found

    results = ResultsFile()
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        results_or_reason(upstream, results)
    results.put(OSError("no space left"))
    with pytest.raises(OSError, match="Worker failure: no space left"):
        results_or_reason(upstream, results)
    results.put({0: []})
    assert results_or_reason(upstream, results) == {0: []}


def test_a_save_leaves_no_process(single_process: None, tmp_path: Path) -> None:
    """Stock keeps a spawned manager, which a killed training leaves behind for ever."""
    from megatron.core.dist_checkpointing import ShardedTensor, load

    before = set(psutil.Process().children(recursive=True))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        _save(tmp_path / name)
    # a parent of earlier tests may be starting a process that ends by itself
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=30)
    assert alive == []
    wanted = {"two": ShardedTensor.from_rank_offsets("two", torch.empty(6))}
    assert torch.equal(load(wanted, str(tmp_path / "second"))["two"], torch.arange(6.0))


def _put(results: ResultsFile, *items: object) -> None:
    for item in items:
        results.put(item)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_of_a_child_reach_its_parent(start: str) -> None:
    results = ResultsFile()
    results.put("own")
    child = multiprocessing.get_context(start).Process(target=_put, args=(results, {0: LARGE}, "last"))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert [results.get_nowait() for _ in range(3)] == ["own", {0: LARGE}, "last"]
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_what_was_read_takes_no_room() -> None:
    results = ResultsFile()
    for _ in range(3):
        _put(results, LARGE, LARGE)
        assert (results.get_nowait(), results.get_nowait()) == (LARGE, LARGE)
        assert os.fstat(results._file.fileno()).st_size == 0


@pytest.fixture
def orphaned(single_process: None) -> Any:
    """Return a caller of the persistent worker whose worker was killed while it wrote."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    caller = PersistentAsyncCaller()
    caller.process = multiprocessing.get_context("fork").Process(target=_die)
    caller.process.start()
    caller.queue.put("a request")
    return caller


@pytest.mark.parametrize("blocking", [True, False])
def test_a_persistent_worker_that_was_killed_is_named(orphaned: Any, blocking: bool) -> None:
    """Stock polls for its word for ever, and waits for it at the end."""
    number = orphaned.process.pid
    orphaned.process.join()
    with pytest.raises(RuntimeError, match=rf"process {number}\) was killed by SIGKILL.*--load"):
        orphaned.is_current_async_call_done(blocking=blocking)
    orphaned.close()
    assert orphaned.process is None


def test_the_last_word_of_a_persistent_worker_counts(orphaned: Any) -> None:
    orphaned.process.join()
    orphaned.comp_q.put(0)
    while orphaned.comp_q.empty():  # a thread puts it
        time.sleep(0.01)
    assert orphaned.is_current_async_call_done(blocking=True)


def test_nobody_waits_for_a_dead_worker_to_copy(orphaned: Any) -> None:
    orphaned.preload_q.put(0)
    with persistent_worker._waiting_for_living(orphaned):
        orphaned.preload_q.join()
