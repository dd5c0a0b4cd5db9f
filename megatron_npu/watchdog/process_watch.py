"""The watch of this process: begun once, by whoever begins it, and ended with the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from megatron_npu.base import settings
from megatron_npu.watchdog import prompt, restarts
from megatron_npu.watchdog.alone import Alone
from megatron_npu.watchdog.board import Board, connect
from megatron_npu.watchdog.rank import Rank


class _OfProcess:
    """What this process knows of its watch.

    Attributes:
        step: the number of the step of training.
        runs: how many runs of several ranks were watched before.
        watch: the one that continues.
    """

    step = 0
    runs = 0
    watch: Rank | Alone | None = None


_process = _OfProcess()


def step(number: int) -> None:
    """Note that the step with this number begins."""
    _process.step = number


def begin(step_now: Callable[[], int] = lambda: _process.step) -> None:
    """Watch from now on until the process ends: other ranks, or itself if there are none. All must call this.

    A second call does nothing.

    Args:
        step_now: returns the number of the step that this rank is in.
    """
    if isinstance(_process.watch, Alone) and not _process.watch.watches:
        _process.watch = None  # of an earlier run in this process
    limit = float(str(settings.WATCHDOG.value()))
    if _process.watch is not None or not dist.is_initialized() or not limit:
        return
    prompt.make_visible()
    if dist.get_world_size() == 1:
        _process.watch = Alone(limit, step_now)
        _process.watch.start()
        return
    store = connect()
    if store is None:
        return
    board = Board(store, f"{restarts.attempt()}/{_process.runs}", f"{store.host}:{store.port}")
    _process.watch = Rank(board, dist.get_rank(), dist.get_world_size(), limit, step_now)
    _process.runs += 1
    _process.watch.start()


def end() -> None:
    """Watch no longer: the run has ended well."""
    if _process.watch is not None:
        _process.watch.stop()
        _process.watch = None


def failed(error: BaseException) -> bool:
    """Find out whether another rank is the reason for an error; if none is, tell the others of it.

    The others are watched on, as ending may hang too.

    Returns:
        Whether another rank is, which has been printed then.
    """
    return _process.watch is not None and _process.watch.failed(error)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watch in the block, which lies inside of a process group."""
    begin()
    try:
        yield
    except Exception as error:
        failed(error)
        raise
    else:
        end()
    finally:
        if isinstance(_process.watch, Alone):  # ranks are watched while they end with an error
            end()
