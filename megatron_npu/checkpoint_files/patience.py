"""Wait until all ranks have done their part of a work that may take longer than a collective waits.

A collective fails after ``--distributed-timeout-minutes``, so a rank that waits in one would end a healthy
run whose other ranks still copy a large checkpoint. Ranks therefore count the finished parts in the store of
the process group. Each rank asks for the count at most once a second, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_PAUSE = 1.0  # seconds at most between two questions of a waiting rank
_BEAT = 10.0  # seconds between two signs of life of a working rank
_LOST = 600.0  # seconds without any of them, as torch waits; the watchdog detects a lost rank earlier

_works = itertools.count()  # the same number on all ranks, because all of them call ``done_by_all``


def done_by_all(work: Callable[[], None]) -> None:
    """Do this rank's part of a work, and wait for the parts of all ranks. All ranks must call this.

    Args:
        work: must not raise an error: other ranks would not learn of it.

    Raises:
        RuntimeError: ranks that have not finished have sent no sign of life for ten minutes, or the store is
            lost.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        work()
        return
    store: Any = dist.distributed_c10d._get_default_store()
    board = dist.PrefixStore(f"megatron_npu/work/{next(_works)}", store)
    with _signs_of_life(board):
        work()
    board.add("done", 1)
    wait_for_others(board, dist.get_world_size())


def wait_for_others(board: dist.Store, ranks: int) -> None:
    """Wait until all ranks are done, as long as those that are not send signs of life."""
    began = lively = time.monotonic()
    beats = board.add("beats", 0)
    while (done := board.add("done", 0)) < ranks:
        now = time.monotonic()
        if now - lively > _BEAT / 2 and (later := board.add("beats", 0)) != beats:
            beats, lively = later, now
        if now - lively > _LOST:
            raise RuntimeError(
                f"{ranks - done} of {ranks} ranks have not finished, and have sent no sign of life for "
                f"{_LOST:.0f} s"
            )
        time.sleep(min(_PAUSE, 0.01 + (now - began) / 10))


@contextlib.contextmanager
def _signs_of_life(board: dist.Store) -> Iterator[None]:
    """Count signs of life of this rank in the store during the block."""
    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost: this rank learns it at its next question
            while not ended.wait(_BEAT):
                board.add("beats", 1)

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
