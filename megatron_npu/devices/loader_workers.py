"""Make data-loader workers use unnamed shared memory, and report killed workers as one-line errors."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import queue
import re
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from torch.utils.data import _utils, dataloader
from torch.utils.data._utils import signal_handling, worker

from megatron_npu.base.errors import LoaderWorkerError
from megatron_npu.base.replaced import Replaced
from megatron_npu.devices import nameless_sharing
from megatron_npu.devices.base import Replacement

_UNTIL_SEEN = 2.0  # seconds

_replaced = Replaced()
_noted: list[str] = []  # torch's words about workers of this process that have died
_taking: list[Any] = []  # iterators whose next batch is being taken


def begin() -> None:
    """Patch torch's data loaders in this process and in the children that it forks.

    A second call has no effect.
    """
    if not _replaced:
        for owner, name, value in (*nameless_sharing.replacements(), *_failures()):
            _replaced.set(owner, name, value)


def end() -> None:
    """Restore torch's original data loaders."""
    _replaced.undo()


def _failures() -> Iterator[Replacement]:
    """Yield replacements that report a dead worker when a batch is requested, instead of in the signal
    handler.

    An error raised in the signal handler could interrupt a save halfway, or be swallowed, for example in a
    Python callback.
    """
    yield signal_handling, "_error_if_any_worker_fails", _noting(signal_handling._error_if_any_worker_fails)
    iterator = dataloader._MultiProcessingDataLoaderIter
    yield iterator, "__init__", _starting(iterator.__init__)
    yield iterator, "_next_data", _telling(iterator._next_data)
    yield iterator, "_try_get_data", _try_to_take
    yield worker, "ManagerWatchdog", _Watchdog


_CLOSED = "/dev/shm holds their queues: let all users write to it (mode 1777), or pass --num-workers 0."
_REMEDIES = {
    errno.EACCES: _CLOSED,
    errno.EAGAIN: "Raise the number of processes (ulimit -u, docker --pids-limit), or lower --num-workers.",
    errno.EMFILE: "Raise the number of open files (ulimit -n), or lower --num-workers.",
    errno.ENOMEM: "There is not enough memory for that many workers: lower --num-workers.",
    errno.ENOSPC: (
        "/dev/shm, which holds their queues, is full: enlarge it (docker run --shm-size), or "
        "lower --num-workers."
    ),
    errno.EROFS: _CLOSED,
}


def _starting(method: Callable[..., None]) -> Callable[..., None]:
    """Return an ``__init__`` for iterators that raises ``LoaderWorkerError`` if workers cannot be started."""

    @functools.wraps(method)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except OSError as error:
            for begun in getattr(self, "_workers", ()):
                begun.kill()
                begun.join()
            self._shutdown = True  # else torch's own end asks for what has not been made
            if error.errno not in _REMEDIES:
                raise
            what = f"the data-loader workers (--num-workers) cannot be started: {error.strerror}"
            raise LoaderWorkerError(what, _REMEDIES[error.errno]) from error
        self._workers_done_event = _DoneEvent(self._workers_done_event, self._workers)

    return start


class _DoneEvent:
    """Replacement for the event that tells workers to exit.

    The main process never waits for a dead worker.

    A worker takes the event's lock each time that it reads the event. If it is killed at that moment, the
    lock stays taken, and torch 2.13 would wait for it forever. torch relies on its SIGCHLD handler to end
    this wait by an error, but the signal may arrive earlier, and ``_noting`` only records it.
    """

    def __init__(self, event: Any, workers: list[Any]) -> None:
        self._event = event
        self._workers = workers
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set  # workers only read it

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._free_lock()
            self._event._flag.release()  # what its own method does, and wakes those who wait: nobody does

    def _free_lock(self) -> None:
        """Wait until the event's lock is free, and release it for a worker that has died."""
        lock = self._event._cond
        while not lock.acquire(timeout=_UNTIL_SEEN):  # a worker that is alive holds it for microseconds
            if any(worker.exitcode is not None for worker in self._workers):
                break
        lock.release()


class _Watchdog(worker.ManagerWatchdog):  # type: ignore[misc]
    """Replacement for torch's check whether the parent of a worker is alive.

    An orphaned worker exits.

    torch 2.13 records the parent only when the worker starts running. If the parent has been killed since the
    fork, torch records another process, and the worker would wait forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager_dead = _is_orphan()


def _is_orphan() -> bool:
    """Return True if the parent process, which forked this process, has ended.

    Other start methods always give False.
    """
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return parent is not None and method == "fork" and os.getppid() != parent.pid


def _noting(raise_if_one_failed: Callable[[], None]) -> Callable[[], None]:
    """Return a replacement for torch's SIGCHLD handler that records the error for later."""

    @functools.wraps(raise_if_one_failed)
    def note() -> None:
        try:
            raise_if_one_failed()
        except RuntimeError as error:
            _noted.append(str(error))
            if _taking:  # perhaps the rest of what a dead one has begun to send
                raise

    return note


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's method for fetching batches, changed to raise ``LoaderWorkerError`` if a worker has
    died.
    """

    @functools.wraps(method)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return _take(method, self, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            _tell_of(self)
            raise LoaderWorkerError(" ".join(str(error).split())) from error.__cause__
        except (ConnectionError, EOFError) as error:  # it closes its files before it is seen as dead
            workers = {worker.sentinel: worker for worker in self._workers}
            ended = [str(workers[each].pid) for each in connection.wait(workers, _UNTIL_SEEN)]
            _tell_of(self)
            if not ended:  # an error of the user's data
                raise
            what = f"DataLoader worker (pid {', '.join(ended)}) exited while sending a batch"
            raise LoaderWorkerError(what) from error

    return take


def _try_to_take(self: Any, timeout: float = _utils.MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
    """Try to get a batch, like torch's method of the same name.

    Return whether a batch has arrived, and the batch.

    On an error, torch 2.13 also creates ten temporary files to check whether file descriptors are exhausted.
    A rank that is killed in the meantime, as all ranks are after one has failed, would leave these files
    behind. Errors about descriptors are clear without this check.

    Raises:
        RuntimeError: a worker has died; the message is torch's.
    """
    try:
        return True, self._data_queue.get(timeout=timeout)
    except Exception as error:
        dead = [
            number
            for number, worker in enumerate(self._workers)
            if self._workers_status[number] and not worker.is_alive()
        ]
        for number in dead:
            self._mark_worker_as_unavailable(number)
        if dead:
            pids = ", ".join(str(self._workers[number].pid) for number in dead)
            raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly") from error
        if isinstance(error, queue.Empty):
            return False, None
        raise


def _take(method: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
    """Get a batch, or raise an error as soon as a worker dies."""
    _taking.append(iterator)
    try:
        _tell_of(iterator)
        return method(iterator, *args, **kwargs)
    finally:
        _taking.pop()


def _tell_of(iterator: Any) -> None:
    """Raise ``LoaderWorkerError`` if one of the iterator's workers is recorded as dead."""
    numbers = {str(worker.pid) for worker in iterator._workers}
    for death in _noted:
        if not numbers.isdisjoint(re.findall(r"\d+", death)):
            raise LoaderWorkerError(" ".join(death.split())) from None
