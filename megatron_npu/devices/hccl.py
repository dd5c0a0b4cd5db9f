"""Add NCCL features that Megatron requires to HCCL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUFFER = "hccl_buffer_size"  # as torch_npu's ProcessGroupHCCL.Options().hccl_config names it, in MiB
_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda values: values.sum(0),
    dist.ReduceOp.AVG: lambda values: values.mean(0),
    dist.ReduceOp.MIN: lambda values: values.amin(0),
    dist.ReduceOp.MAX: lambda values: values.amax(0),
}


def buffer_of(group: dist.ProcessGroup) -> int | None:
    """Return the size in MiB of a group's HCCL buffer, as set in the group's options, or None if it is
    not set.
    """
    options = _options_of(group)
    return None if options is None else options.hccl_config.get(BUFFER)


def set_buffer(group: dist.ProcessGroup, mebibytes: int) -> bool:
    """Set the HCCL buffer size of a group whose communicator has not been created yet.

    torch_npu creates the communicator at the first collective.

    Returns:
        True if the group is an HCCL group.
    """
    options = _options_of(group)
    if options is not None:
        options.hccl_config = {**options.hccl_config, BUFFER: mebibytes}
    return options is not None


def _options_of(group: dist.ProcessGroup) -> Any:
    options = getattr(group._get_backend(torch.device("npu")), "options", None)
    return options if hasattr(options, "hccl_config") else None


def group_options(config: dict[str, int], high_priority: bool) -> Any:
    """Return options for a process group in the form that torch_npu accepts.

    Args:
        config: the settings of the communicator under HCCL's names: ``hccl_buffer_size`` in MiB,
            ``hccl_exec_timeout`` in seconds, ``hccl_op_expansion_mode``.
        high_priority: whether the communicator's stream has high priority.
    """
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options.is_high_priority_stream = high_priority
    options.hccl_config = config
    return options


def scatter_sums_of_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reduce_scatter`` that accepts non-contiguous parts, such as columns of a matrix.

    NCCL accepts them. torch_npu combines the parts with the strides of the first part, and then rejects the
    result.
    """

    @functools.wraps(original)
    def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(output, [part.contiguous() for part in input_list], *args, **kwargs)

    return reduce_scatter


def all_reduce_float64(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``all_reduce`` that also accepts float64, which HCCL rejects.

    Megatron reduces its start time in float64, which is a few bytes and happens once. The bits are gathered
    as int64, and every rank reduces the values on the host.
    """

    @functools.wraps(original)
    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        reduce = _REDUCTIONS.get(op)
        if tensor.dtype != torch.float64 or tensor.device.type != "npu" or async_op or reduce is None:
            return original(tensor, op, group, async_op)
        bits = [torch.empty_like(tensor, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(bits, tensor.contiguous().view(torch.int64), group=group)
        values = torch.stack(bits).cpu().view(torch.float64)
        tensor.copy_(reduce(values))
        return None

    return all_reduce
