"""Detect the death of the persistent worker for asynchronous checkpoints, and end the worker when the
training ends.

Patches ``PersistentAsyncCaller`` of ``megatron.core.dist_checkpointing.strategies.async_utils``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import queues, resource_tracker, synchronize
from typing import Any

from megatron_npu.adaptors.megatron_core.checkpoints.checkpoint_writers import end_of, end_with_parent
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around
from megatron_npu.base.replaced import Replaced

_CALLER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"
_POLL = 0.1  # seconds, as upstream
# Attributes of the caller up to 0.16; from 0.17 on they are of its class.
_OUTGOING = ("queue", "preload_q", "_persistent_queue", "_persistent_preload_q")
_FINISHED = ("comp_q", "_persistent_comp_q")
_OF_CLASS = ("_persistent_process", "_persistent_queue", "_persistent_preload_q", "_persistent_comp_q")

_mended = functools.partial(around, upstream_bug=True, until=NOT_FIXED)


@_mended(
    f"{_CALLER}.async_loop",
    why="the persistent worker outlives a killed training run and waits for its next checkpoint; 19 names "
    "in /dev/shm remain even if every process is killed",
)
def end_with_training(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make the kernel end this worker process when its parent ends, and unlink the worker's semaphores."""
    end_with_parent()
    for each in (*args, *kwargs.values()):
        for semaphore in _semaphores(each):
            _take_name(semaphore._semlock.name)  # type: ignore[attr-defined]
    return original(*args, **kwargs)


def _semaphores(value: Any) -> Iterator[synchronize.SemLock]:
    """Yield the semaphores that an inter-process queue uses.

    Yield nothing for any other value.
    """
    if isinstance(value, synchronize.SemLock):
        yield value
    elif isinstance(value, (queues.Queue, synchronize.Condition)):
        for each in vars(value).values():
            yield from _semaphores(each)


def _take_name(name: str) -> None:
    """Unlink a semaphore's name if the name exists.

    Processes that have opened the semaphore can still use it.
    """
    try:
        synchronize.sem_unlink(name)  # type: ignore[attr-defined]  # typeshed does not know it
    except FileNotFoundError:
        return
    resource_tracker.unregister(name, "semaphore")


@contextlib.contextmanager
def _names_may_go() -> Iterator[None]:
    """Allow semaphores created inside the ``with`` block to be unlinked before their regular cleanup."""
    replaced = Replaced()
    replaced.set(synchronize.SemLock, "_cleanup", staticmethod(_take_name))
    try:
        yield
    finally:
        replaced.undo()


_WHY_NAMES = "at exit Python would complain about names that the worker has already removed"


@_mended(f"{_CALLER}.__init__", versions="<0.17", why=_WHY_NAMES)
def make_queues(original: Callable[..., None], self: Any) -> None:
    """Create the queues for communication with the worker.

    Their semaphores keep their names until the worker has opened them.
    """
    with _names_may_go():
        original(self)


@_mended(f"{_CALLER}._get_process", versions=">=0.17", why=_WHY_NAMES)
def start_worker(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create the queues like ``make_queues``, and start the worker."""
    with _names_may_go():
        return original(*args, **kwargs)


@_mended(
    f"{_CALLER}.is_current_async_call_done",
    why=(
        "upstream polls for the answer of a worker that may be dead: forever at the end of the run, and "
        "without any message before"
    ),
)
def require_worker(
    original: Callable[..., bool], self: Any, blocking: bool = False, no_dist: bool = False
) -> bool:
    """Wait for the worker's answer, and raise an error if the worker is dead.

    With ``blocking``, wait for it as long as the worker is alive.

    Raises:
        RuntimeError: the worker has died, and the checkpoint is incomplete.
    """
    while self.process is not None and self.cur_item is None:
        dead = not self.process.is_alive()  # asked first: its last word may still be there
        try:
            [finished] = _queues(self, _FINISHED)
            self.cur_item = finished.get_nowait()
        except queue.Empty:
            if dead:
                raise _error(self) from None
            if not blocking:
                break
            time.sleep(_POLL)
    return original(self, blocking, no_dist)


@_mended(
    f"{_CALLER}.schedule_async_call",
    why=(
        "upstream waits forever for a dead worker to copy the tensors (unless a patch copies them first),"
        " and a training run that fails waits forever for its worker (up to 0.16)"
    ),
    order=1,  # what copies the tensors lies inside
)
def hand_over_to_living(original: Callable[..., None], self: Any, async_req: Any) -> None:
    """Wait for the worker only as long as it is alive, and kill it when this process exits.

    Raises:
        RuntimeError: the worker has died.
    """
    first = self.process is None
    with _waiting_for_living(self):
        original(self, async_req)
    if first:
        atexit.register(_kill, self, os.getpid())  # called before multiprocessing waits for its children
    if _is_dead(self):
        raise _error(self)


@_mended(f"{_CALLER}.close", why="upstream waits forever for a dead worker to exit")
def close_living(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Close the worker, or discard it if it is already dead.

    The loss of its checkpoint, if any, has already been reported.
    """
    if _is_dead(self):
        return _forget(self)
    if self.process is None:  # which upstream only logs, with a rank that there may not be any more
        return None
    with _waiting_for_living(self):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _waiting_for_living(caller: Any) -> Iterator[None]:
    """Make ``join`` on the queues of a dead worker return inside the ``with`` block."""
    over = threading.Event()

    def release() -> None:
        while not over.wait(_POLL):
            if _is_dead(caller):
                for each in _queues(caller, _OUTGOING):
                    with contextlib.suppress(ValueError):  # all are done
                        while True:
                            each.task_done()

    thread = threading.Thread(target=release, name="megatron_npu checkpoint worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _kill(caller: Any, owner: int) -> None:
    """Kill a worker that the training has not closed.

    The files that it writes would never be finalized.
    """
    if os.getpid() == owner and caller.process is not None:
        caller.process.kill()
        caller.process.join()
        _forget(caller)


def _forget(caller: Any) -> None:
    """Remove the reference to the worker from its caller and, since 0.17, also from the caller's class."""
    _leave_content(caller)
    caller.process = None
    for name in _OF_CLASS:
        if hasattr(type(caller), name):
            setattr(type(caller), name, None)


def _leave_content(caller: Any) -> None:
    """Allow this process to exit while items in the worker's queues are still unread."""
    for each in _queues(caller, _OUTGOING):
        each.cancel_join_thread()


def _is_dead(caller: Any) -> bool:
    process = caller.process
    return process is not None and process.pid is not None and not process.is_alive()


def _queues(caller: Any, names: tuple[str, ...]) -> list[Any]:
    found = (getattr(caller, name, None) for name in names)
    return [each for each in found if each is not None]


def _error(caller: Any) -> RuntimeError:
    process = caller.process
    _leave_content(caller)
    return RuntimeError(
        "the persistent process that writes checkpoints (--use-persistent-ckpt-worker, process "
        f"{process.pid}) {end_of(process.exitcode)}, so its checkpoint is incomplete. Start the run again "
        "with --load to resume from the newest complete checkpoint"
    )
