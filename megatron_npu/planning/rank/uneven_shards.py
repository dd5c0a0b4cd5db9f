"""Shards of Megatron-FSDP, which each rank compares with those of ranks that do not exist in a plan."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# megatron-core, 0.14.0 to main: it gathers the shapes of all shards, then checks that together they reach
# both ends of each dimension
_CHECK = "validate_uneven_dtensor"
_GATHER = "_update_offsets_and_cumulative_shape"

# frames between one of the two and a collective: this module, the device's redirects, torch's logging
_FRAMES = 8


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let the check pass: the other ranks' shards are empty and reach both ends of each dimension."""
    reduce, gather = dist.all_reduce, dist.all_gather_object

    @functools.wraps(reduce)
    def all_reduce(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        if _is_in(_CHECK):
            tensor.fill_(1)
        return reduce(tensor, *given, **named)

    @functools.wraps(gather)
    def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
        gather(objects, mine, group)
        if _is_in(_GATHER):
            rank = dist.get_rank(group)
            objects[:] = [mine if at == rank else [0] * len(mine) for at in range(len(objects))]

    functions: dict[str, Callable[..., Any]] = {
        "all_reduce": all_reduce,
        "all_gather_object": all_gather_object,
    }
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            for owner in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _is_in(name: str) -> bool:
    """Return whether a function of this name has called the collective."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
