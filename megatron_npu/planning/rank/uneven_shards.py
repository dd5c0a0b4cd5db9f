"""Support Megatron-FSDP, which compares the shards of a rank with the shards of absent ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_npu.planning.rank import program_lines

# megatron-core, 0.14.0 to main: it gathers the shapes of all shards, then checks that together they reach
# both ends of each dimension
_CHECK = "validate_uneven_dtensor"
_GATHER = "_update_offsets_and_cumulative_shape"


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Make the check for uneven shards succeed.

    Shards of absent ranks are empty and reach both ends of each dimension.
    """
    reduce, gather = dist.all_reduce, dist.all_gather_object

    @functools.wraps(reduce)
    def all_reduce(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        if program_lines.nearest(_CHECK, sys._getframe(1)):
            tensor.fill_(1)
        return reduce(tensor, *given, **named)

    @functools.wraps(gather)
    def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
        gather(objects, mine, group)
        if program_lines.nearest(_GATHER, sys._getframe(1)):
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
