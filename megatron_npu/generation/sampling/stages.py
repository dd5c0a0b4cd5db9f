"""Broadcast results from the last pipeline stage, which has the logits, to all ranks of a model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base.errors import UsageError


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Broadcast a tensor from the last pipeline stage, and return it on all ranks.

    All tensor-parallel ranks of that stage must have the same value.
    """
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    shared = values.to(devices.current().torch_device())
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(shared, last, group=parallel_state.get_pipeline_model_parallel_group())
    return shared.cpu()


def not_numbers() -> UsageError:
    """Return the error that reports NaN or infinite logits."""
    return UsageError(
        "the model's logits are NaN or infinite, because the training diverged or the precision is too low",
        remedy="Load an earlier checkpoint, or compute in another precision.",
    )
