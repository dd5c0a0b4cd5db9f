"""Decide for each collective of gloo whether it uses shared memory or sockets."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.base import settings
from megatron_npu.devices.shared_memory_collectives import Segment

logger = logging.getLogger(__name__)

_SMALLEST = 1 << 18  # bytes; below it both take as long as it takes to wait for each other
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)

# Of a group of gloo: its segment, None where its ranks cannot share memory.
_segments: weakref.WeakKeyDictionary[dist.ProcessGroup, Segment | None] = weakref.WeakKeyDictionary()
# Groups inside a coalescing manager that waits for what it has coalesced before it ends.
_waited_for: set[dist.ProcessGroup] = set()


def all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_reduce`` that uses shared memory when possible."""

    @functools.wraps(original)
    def collective(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        segment = _segment(group, async_op, tensor) if op == dist.ReduceOp.SUM else None
        if segment is None:
            return original(tensor, op, group, async_op)
        segment.all_reduce(_in_order_of_memory(tensor))

    return collective


def reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reduce_scatter_tensor`` that uses shared memory when possible."""

    @functools.wraps(original)
    def collective(
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        segment = _segment(group, async_op, input, output) if op == dist.ReduceOp.SUM else None
        if segment is None:
            return original(output, input, op, group, async_op)
        segment.reduce_scatter(_in_order_of_memory(output), _in_order_of_memory(input))

    return collective


def all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_gather_into_tensor`` that uses shared memory when possible."""

    @functools.wraps(original)
    def collective(
        output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        segment = _segment(group, async_op, output_tensor, input_tensor)
        if segment is None:
            return original(output_tensor, input_tensor, group, async_op)
        segment.all_gather(_in_order_of_memory(output_tensor), _in_order_of_memory(input_tensor))

    return collective


def coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``_coalescing_manager`` whose collectives may use shared memory if it waits for them before it
    exits.

    Megatron's DDP wraps the collectives of all its buckets in this manager. With ``async_ops``, all of them
    must use gloo, because the manager returns their handles.
    """

    @functools.wraps(original)
    @contextlib.contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        key = group or dist.distributed_c10d._get_default_group()
        with original(group, device, async_ops) as coalesced:
            if not async_ops:
                _waited_for.add(key)
            try:
                yield coalesced
            finally:
                _waited_for.discard(key)

    return manager


def _segment(group: Any, async_op: bool, larger: Any, smaller: Any = None) -> Segment | None:
    """Return the shared memory for a collective, or None if gloo's sockets should be used.

    The decision depends only on what is the same on all ranks: dtype and size, the group, and whether the
    caller waits. Asynchronous collectives use gloo, because ranks could run them in different orders.
    """
    if async_op or torch.compiler.is_compiling() or not _are_for_memory(larger, smaller):
        return None
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    if not _is_for_memory(group):
        return None
    if smaller is not None and not _fit(larger, smaller, group.size()):
        return None  # torch says what does not fit
    if group not in _segments:
        _segments[group] = _made(group)
    return _segments[group]


def _are_for_memory(larger: Any, smaller: Any) -> bool:
    """Return True if the dtype and the size of the tensors are suitable for shared memory.

    ``smaller`` may be None.
    """
    if not all(_is_plain(tensor) for tensor in (larger, smaller) if tensor is not None):
        return False
    return larger.nbytes >= _SMALLEST and larger.dtype in _DTYPES


def _is_for_memory(group: Any) -> bool:
    """Return True if a group supports shared memory.

    Such a group must use gloo, have several ranks, and not be coalescing asynchronous collectives.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() < 2 or dist.get_backend(group) != "gloo":
        return False
    return group not in dist.distributed_c10d._world.pg_coalesce_state or group in _waited_for


def _is_plain(tensor: Any) -> bool:
    """Return True if the argument is a plain tensor on the host, not a subclass such as DTensor."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.is_cpu


def _fit(larger: Tensor, smaller: Tensor, ranks: int) -> bool:
    """Return True if ``larger`` has the size of one ``smaller`` per rank, and both are contiguous."""
    return (
        larger.dtype == smaller.dtype
        and larger.numel() == ranks * smaller.numel()
        and larger.is_contiguous()
        and smaller.is_contiguous()
    )


def _made(group: dist.ProcessGroup) -> Segment | None:
    """Return a buffer in memory that the ranks of ``group`` share.

    Return None, and log the reason, if they cannot share memory.
    """
    if not settings.SHARED_MEMORY.enabled():
        return None
    try:
        return Segment(group)
    except OSError as error:
        if group.rank() == 0:
            logger.warning("collectives use sockets, because the ranks cannot share memory: %s", error)
        return None


def _in_order_of_memory(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order, ``[elements]``, without autograd history."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
