"""Run the watchdog of this process, which ``begin`` starts and which stops at the end of the run."""

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
    """The state of this process's watchdog.

    Attributes:
        step: the number of the current training step.
        runs: the number of multi-rank runs watched so far.
        watch: the active watchdog, or None.
    """

    step = 0
    runs = 0
    watch: Rank | Alone | None = None


_process = _OfProcess()


def step(number: int) -> None:
    """Record the number of the training step that starts now."""
    _process.step = number


def begin(step_now: Callable[[], int] = lambda: _process.step) -> None:
    """Start the watchdog, which runs until the process ends.

    All ranks must call this.

    A single process watches itself. A second call has no effect.

    Args:
        step_now: returns the number of this rank's current step.
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
    """Stop the watchdog because the run is complete."""
    if _process.watch is not None:
        _process.watch.stop()
        _process.watch = None


def failed(error: BaseException) -> bool:
    """Return True if the error was caused by another rank.

    If not, report the error to the other ranks.

    The other ranks are still watched, because the exit may hang too.

    Returns:
        True if another rank caused the error, in which case this has been printed.
    """
    return _process.watch is not None and _process.watch.failed(error)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Run the watchdog inside the ``with`` block.

    A process group must exist.
    """
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
