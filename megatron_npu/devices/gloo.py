"""What gloo cannot do and Megatron asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


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
