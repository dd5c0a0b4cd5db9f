"""Gather the tensors of all ranks for computing metrics."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.labels import IGNORED


def gather(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension.

    All ranks must call this function. The tensors may have different lengths. In the other dimensions,
    shorter tensors are padded: integers with ``IGNORED``, floating-point values with 0. Scalars are returned
    as one value per rank, [world_size].

    Args:
        tensor: this rank's tensor; its dtype and number of dimensions must be the same on all ranks.
        world_size: number of ranks.

    Raises:
        UsageError: ``tensor`` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"gather requires a tensor, but got {type(tensor).__name__}. Convert the value with "
            "torch.tensor(...)."
        )
    tensor = tensor.detach()
    if tensor.dim() == 0:
        tensor = tensor[None]
    if world_size == 1:
        return tensor
    shapes = _shapes(tensor, world_size)
    largest = shapes.amax(0).tolist()
    padded = _filled(tensor, largest)
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(shape[0])] for part, shape in zip(parts, shapes, strict=True)])


def _shapes(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the shapes of the tensors on all ranks, ``[world_size, dimensions]``."""
    own = torch.tensor(tensor.shape, device=tensor.device)
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own)
    return torch.stack(parts).cpu()


def _filled(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if list(tensor.shape) == shape:
        return tensor.contiguous()
    value = 0 if tensor.is_floating_point() or tensor.dtype == torch.bool else IGNORED
    filled = tensor.new_full(shape, value)
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled
