"""Add NCCL features that Megatron requires to gloo, and let processes exit cleanly while process groups
exist.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.base.errors import UsageError

logger = logging.getLogger(__name__)

_NO_INTERFACE = re.compile(r"Unable to (?:find|resolve) (?:interface|address|hostname)[^\n]*")
# How the names of torch's threads begin that release Python objects after their work is reported as complete
# (ProcessGroupGloo's; a device's in the backward pass; torch 2.13), and where Linux shows what threads do.
_WORKERS = ("pt_gloo_runloop", "pt_autograd_")
_THREADS = Path("/proc/self/task")


@contextlib.contextmanager
def naming_interfaces() -> Iterator[None]:
    """Name the network interface that gloo does not find inside the ``with`` block, where it connects.

    Raises:
        UsageError: it does not exist, or has no address.
    """
    try:
        yield
    except RuntimeError as error:
        found = _NO_INTERFACE.search(str(error))
        if found is None:
            raise
        raise UsageError(
            f"gloo cannot find a network interface of this machine: {found[0]}",
            remedy="Set GLOO_SOCKET_IFNAME to an interface that exists, or bring up the loopback (ip link "
            "set lo up).",
        ) from error


def ignore_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_gather_into_tensor`` or ``reduce_scatter_tensor`` that ignores shapes, as NCCL does.

    gloo requires the larger tensor to have the shape of the stacked or concatenated smaller ones. Megatron
    gathers ``[s, b, h]`` shards into one flat buffer (``gather_split_1d_tensor``). Both are contiguous.
    """

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and args[0].dim() != args[1].dim() and all(t.is_contiguous() for t in args[:2]):
            args = (args[0].view(-1), args[1].view(-1), *args[2:])
        return original(*args, **kwargs)

    return collective


def hold_sent_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``isend`` that keeps the memory of pending send operations alive.

    Megatron's schedules free the memory of an output as soon as its send is issued (``out.data = ...``),
    which is safe on a CUDA stream. gloo reads the memory later, in another thread, so the receiver could get
    different data. A detached alias keeps the storage alive until the send is complete.
    """

    @functools.wraps(original)
    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return isend


def scatter_whole_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``scatter`` that accepts non-contiguous views, such as columns of a matrix.

    gloo silently sends contiguous memory from a tensor's first element on, including gaps (torch 2.13). On
    other devices, copying such a view to the device makes it contiguous.
    """

    @functools.wraps(original)
    def scatter(
        tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        _require_no_gaps("scatter", tensor)
        whole = scatter_list and [part.contiguous() for part in scatter_list]
        return original(tensor, whole, *args, **kwargs)

    return scatter


def gather_unequal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_gather`` that accepts parts of different sizes, as NCCL does.

    gloo rejects such parts. Here, each rank sends its part to all other ranks, as NCCL's backend does.
    """

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        equal = len({part.shape for part in tensor_list if isinstance(part, Tensor)}) < 2
        rank = -1 if equal else dist.get_rank(group)
        if rank < 0:
            return original(tensor_list, tensor, group, async_op)
        mine = tensor_list[rank]
        if mine.shape != tensor.shape:
            raise ValueError(
                "all_gather requires output tensors of the same shapes as the inputs, but this rank's "
                f"tensor has shape {list(tensor.shape)} and its output tensor has shape {list(mine.shape)}"
            )
        mine.copy_(tensor.detach())
        works = [
            dist.broadcast(part, group=group, group_src=source, async_op=True)
            for source, part in enumerate(tensor_list)
            if part.numel()
        ]
        return _All(works) if async_op else _All(works).wait()

    return all_gather


def all_to_all_in_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward function for autograd's ``all_to_all`` (``torch.distributed.nn``) that works in any
    group.

    With gloo, torch scatters from each rank in turn, but passes the group rank where the global rank is
    expected (torch 2.13), so groups without rank 0 fail. A scatter also rejects parts of unequal sizes, which
    gradients have if the ranks send unequal parts. Here, all parts are sent in one buffer.
    """

    @functools.wraps(original)
    def forward(ctx: Any, group: Any, out_tensor_list: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        if dist.get_backend(group) != "gloo":
            result: tuple[Tensor, ...] = original(ctx, group, out_tensor_list, *tensors)
            return result
        ctx.group, ctx.input_tensor_size_list = group, [tensor.size() for tensor in tensors]
        room = [part.numel() for part in out_tensor_list]
        received = tensors[0].new_empty(sum(room))
        given = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_to_all_single(received, given, room, [tensor.numel() for tensor in tensors], group=group)
        for part, came in zip(out_tensor_list, received.split(room), strict=True):
            part.copy_(came.view_as(part))
        return tuple(out_tensor_list)

    return forward


class _All:
    """Work handle that represents several collectives."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: Any = None) -> None:
        """Wait until all of the collectives are complete."""
        for work in self._works:
            work.wait(*() if timeout is None else (timeout,))

    def is_completed(self) -> bool:
        """Return True if all of the collectives are complete."""
        return all(work.is_completed() for work in self._works)


def refuse_gaps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_reduce`` or ``broadcast`` that rejects non-contiguous tensors, as NCCL does.

    gloo reads and writes memory from the first element on, which silently produces wrong values (torch 2.13).
    """

    @functools.wraps(original)
    def collective(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _require_no_gaps(original.__name__, tensor)
        return original(tensor, *args, **kwargs)

    return collective


def _require_no_gaps(name: str, tensor: Any) -> None:
    """Check that the elements of ``tensor`` have no gaps between them in memory.

    Raises:
        ValueError: there are gaps between elements, or elements overlap.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_contiguous():
        return
    dense = 1  # the stride of the next dimension, from the innermost on
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != dense:
            raise ValueError(
                f"{name} got a tensor of shape {list(tensor.shape)} with strides {list(tensor.stride())}; "
                "Tensors must be contiguous"  # the words of NCCL's backend
            )
        dense *= size


def drop_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``barrier`` that accepts and ignores ``device_ids``, which only NCCL uses."""

    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group, async_op)

    return barrier


def outlive_reducer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``DistributedDataParallel.__init__`` that keeps the process group alive longer than the
    reducer.

    If the reducer holds the last reference to the group (after ``destroy_process_group``), it destroys the
    group while holding the GIL, and waits for gloo's threads. One of these threads may itself wait for the
    GIL to release the context of torch's backward pass, so the process hangs (torch 2.13, about one in
    fifteen models that are freed right after their group; see tests/unit/devices/test_gloo.py). A group whose
    last reference is held by Python is destroyed without the GIL.
    """

    @functools.wraps(original)
    def build(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        reducer = getattr(model, "reducer", None)
        if reducer is not None:  # called, and the group let go, after the reducer's own end
            weakref.finalize(reducer, lambda group: None, model.process_group).atexit = False

    return build


def copy_with_one_thread() -> None:
    """Make each gloo thread that starts from now on use only one OpenMP thread to copy gathered tensors.

    A gloo thread copies the result of a gather with a torch operation, which is parallel from 32,768 elements
    on. With OpenMP, each thread gets its own thread pool, which persists: after one gather, libgomp counts
    more threads than processors and no longer spins at the end of parallel regions, so every small operation
    in training waits for the kernel (twice the step time on two cores; torch 2.13, reproduced without
    Megatron in tests/unit/devices/test_gloo.py).

    A thread reads torch's number of threads when it first needs it. ``torch.set_num_threads`` sets both that
    number and the number of the calling thread, so it is called in a thread that ends immediately. The
    caller's own number is kept; threads that are started later, including those of the program, use one
    thread unless they call ``torch.set_num_threads`` themselves.
    """
    torch.get_num_threads()  # the caller takes its number before it is changed for the others
    setter = threading.Thread(target=torch.set_num_threads, args=(1,))
    setter.start()
    setter.join()


def wait_at_exit() -> None:
    """Make the process wait for torch's threads when it exits; see ``wait_for_workers``."""
    atexit.unregister(wait_for_workers)  # once is enough
    atexit.register(wait_for_workers)


def leave_process() -> None:
    """Undo ``copy_with_one_thread`` and ``wait_at_exit`` for this process."""
    torch.set_num_threads(torch.get_num_threads())  # also of threads that begin later
    atexit.unregister(wait_for_workers)


def wait_for_workers(timeout: float = 10.0) -> bool:
    """Wait until torch's threads are idle.

    Return True if they became idle within ``timeout`` seconds.

    A gloo thread releases its tensors after it has reported a collective as complete, which requires the GIL.
    Megatron's scripts exit without ``destroy_process_group``; if the interpreter is already shutting down,
    C++ aborts the process with "terminate called without an active exception" (signal 6), and a successful
    run is reported as failed (https://github.com/pytorch/pytorch/issues/190489, torch 2.13).
    ``destroy_process_group`` does not help, because Megatron's globals and models in torch's DDP keep the
    groups and their threads alive. A thread that has run the backward pass of a device other than the CPU
    releases its part of the graph in the same way.

    A thread that waits for another process counts as idle, so this function never waits for other ranks.
    """
    if not _THREADS.is_dir():  # macOS shows no threads to an ordinary user
        time.sleep(0.1)
        return True
    deadline = time.monotonic() + timeout
    seen = _workers()
    while seen:
        time.sleep(0.01)  # releases the interpreter's lock to a thread that waits for it
        before, seen = seen, _workers()
        if seen == before and all(asleep for asleep, _ in seen.values()):
            break
        if time.monotonic() > deadline:
            logger.warning("torch's threads are still running after %g s; the process exits anyway", timeout)
            return False
    return True


def _workers() -> dict[str, tuple[bool, int]]:
    """Return, for each of torch's threads, whether it is asleep and how often it has gone to sleep.

    A thread that waits for the GIL sleeps too, but wakes every 5 ms to request it: a thread is idle only if
    it is asleep at two checks in a row and has not woken in between.

    A thread names itself when it first runs. Until then, it has the name of the process and has never slept.
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
        if is_new or status["Name"].strip().startswith(_WORKERS):
            found[thread.name] = (asleep, sleeps)
    return found
