"""Support parameters that torch's FSDP shards by rows in checkpoints of megatron-core.

megatron-core (0.12 to 0.19) writes such rows as parts of the whole tensor, so the checkpoint equals that of a
run without FSDP and can be resumed with any layout. This module handles the cases that megatron-core leaves
to its own scripts or handles incorrectly: the weight of a gated MLP, and converting plain tensors back to
shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_npu.base.errors import UsageError


def require_even(model: Sequence[torch.nn.Module]) -> None:
    """Check that all ranks have the same number of rows of each parameter, as megatron-core's checkpoints
    require.

    Raises:
        UsageError: the rows of a parameter cannot be divided equally among the ranks.
    """
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
            if parameter.size(0) % ranks:
                raise UsageError(
                    "--fsdp-memory-optimization with --save or --load requires the same number of rows on "
                    f"each rank, but {parameter.size(0)} rows of {name.removeprefix('module.')} cannot be "
                    f"distributed evenly over {ranks} ranks",
                    remedy="Use a number of ranks that divides the rows, or --zero-1-memory-optimization.",
                )


def cut_as_rows(chunk: torch.nn.Module, content: dict[str, Any]) -> dict[str, Any]:
    """Return the ``sharded_state_dict`` of a model chunk, with the weights of gated MLPs sharded by rows.

    megatron-core (up to 0.19) treats each rank's rows as half gate, half input. With FSDP, the first ranks
    have the gate and the others the input, so the checkpoint could only be loaded with the same number of
    ranks.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if not any(isinstance(parameter, DTensor) for parameter in chunk.parameters()):
        return content
    return {
        name: _rows(entry) if isinstance(entry, ShardedTensorFactory) else entry
        for name, entry in content.items()
    }


def _rows(factory: Any) -> Any:
    """Return the rows of a tensor as a single shard.

    megatron-core would have split the tensor in two.
    """
    first = factory.build()[0]  # as wide as half of the rows, at this rank's place among the first halves
    axis, rows = first.prepend_axis_num, factory.data.size(0)
    rank = first.global_offset[axis] // first.local_shape[0]
    offset, parts = list(first.global_offset), list(first.axis_fragmentations)
    offset[axis], parts[axis] = rank * rows, first.global_shape[axis] // rows
    return dataclasses.replace(
        first,
        data=factory.data,
        local_shape=tuple(factory.data.shape),
        global_offset=tuple(offset),
        axis_fragmentations=tuple(parts),
    )


def shared_out(content: Any, current: Any) -> Any:
    """Shard the loaded rows in ``content`` in the same way as those in ``current``, and return the result.

    Args:
        content: dictionaries and lists of tensors and other values.
        current: the same structure from the running model or optimizer; it may have more or fewer entries.
    """
    if isinstance(content, dict) and isinstance(current, dict):
        return {name: shared_out(value, current.get(name)) for name, value in content.items()}
    if isinstance(content, list) and isinstance(current, list) and len(content) == len(current):
        return [shared_out(*pair) for pair in zip(content, current, strict=True)]
    if isinstance(current, DTensor) and isinstance(content, Tensor) and not isinstance(content, DTensor):
        return DTensor.from_local(
            content.to(current.device),
            current.device_mesh,
            current.placements,
            run_check=False,
            shape=current.shape,
            stride=current.stride(),
        )
    return content


def rows_of_rank(parameter: Tensor) -> tuple[Tensor, slice]:
    """Return this rank's rows of a parameter, and the indices of these rows.

    An unsharded parameter is returned whole.
    """
    if not isinstance(parameter, DTensor):
        return parameter, slice(0, parameter.size(0))
    rows = parameter.to_local()
    first = parameter.device_mesh.get_local_rank() * rows.size(0)
    return rows, slice(first, first + rows.size(0))
