"""What gloo cannot do and Megatron asks for; the end of a process whose groups nobody has ended."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

# What torch 2.13 calls the threads of a ProcessGroupGloo, and where Linux tells what threads do.
_WORKER = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")


def regardless_of_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_gather_into_tensor`` or ``reduce_scatter_tensor`` that counts numbers only, as NCCL does.

    gloo wants the larger tensor to be the smaller one stacked or concatenated. Megatron gathers
    ``[s, b, h]`` shards into one flat buffer (``gather_split_1d_tensor``). Both are contiguous memory.
    """

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and args[0].dim() != args[1].dim() and all(t.is_contiguous() for t in args[:2]):
            args = (args[0].view(-1), args[1].view(-1), *args[2:])
        return original(*args, **kwargs)

    return collective


def owning_what_is_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``isend`` whose pending sends own the memory that they read.

    Megatron's schedules give an output's memory back as soon as its send is issued (``out.data = ...``),
    which is safe in the order of a CUDA stream. gloo reads it later, from another thread: the receiver
    would get whatever has been written there since. A detached alias keeps the storage until the send
    is done.
    """

    @functools.wraps(original)
    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``barrier`` that takes ``device_ids``, which is NCCL's, and leaves it away."""

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group, async_op)

    return barrier


@functools.cache
def finish_at_exit() -> None:
    """Make the end of the process wait for gloo's threads, see ``let_workers_finish``."""
    atexit.register(let_workers_finish)


def let_workers_finish(timeout: float = 10.0) -> bool:
    """Wait until no thread of gloo is at work; return whether that came within ``timeout`` seconds.

    A thread of gloo gives its tensors back after it has told that a collective is done, and needs the
    interpreter for that. Megatron's scripts end without ``destroy_process_group``: if the interpreter is
    on its way out by then, C++ ends the process with "terminate called without an active exception"
    (signal 6), and a run that has succeeded is reported as failed
    (https://github.com/pytorch/pytorch/issues/190489, torch 2.13). ``destroy_process_group`` does not
    help: Megatron's globals keep the groups, and with them the threads, alive.

    A thread that waits for other processes is not at work: nothing here waits for a peer.
    """
    if not _THREADS.is_dir():  # macOS tells nothing of its threads without privileges
        time.sleep(0.1)
        return True
    deadline = time.monotonic() + timeout
    looked = _workers()
    while looked:
        time.sleep(0.01)  # without the interpreter's lock: a thread that waits for it has it now
        before, looked = looked, _workers()
        if looked == before and all(asleep for asleep, _ in looked.values()):
            break
        if time.monotonic() > deadline:
            logger.warning("threads of gloo are still at work after %g s; the process ends anyway", timeout)
            return False
    return True


def _workers() -> dict[str, tuple[bool, int]]:
    """Return for each thread of gloo whether it sleeps, and how often it has gone to sleep.

    One that waits for the interpreter's lock sleeps, too, but wakes every 5 ms to ask for it: only a
    thread that sleeps at two looks and has not been awake between them has nothing to do.

    A thread gives itself its name when it first runs. Until then it has the process's, and has never slept.
    """
    found = {}
    for thread in _THREADS.iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        status = dict(line.split(":", 1) for line in lines)
        asleep = status["State"].strip().startswith("S")
        sleeps = int(status.get("voluntary_ctxt_switches", -1))  # not every kernel counts them
        is_new = sleeps == 0 and thread.name != str(os.getpid())
        if is_new or status["Name"].strip() == _WORKER:
            found[thread.name] = (asleep, sleeps)
    return found
