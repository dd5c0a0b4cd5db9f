"""Tensors sent between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA


@around(
    "megatron.core.tensor_parallel.utils:gather_split_1d_tensor",
    devices=WITHOUT_CUDA,
    why="while the input requires grad, autograd refuses gloo's writing into views of the gathered tensor, "
    "and with HCCL takes the result for that of a function without gradient",
)
def gather_without_grad(original: Callable[..., Any], tensor: Tensor) -> Any:
    """Gather the values without autograd; the callers mark the result as a leaf themselves."""
    return original(tensor.detach())


@around(
    "megatron.p2p_communication:_communicate",
    why="with one tensor-parallel rank it gathers what it has received from the group of that rank alone: a "
    "collective and a copy for each tensor, and a communicator, for the same bits; counted on the simulated "
    "NPU, no time measured",
)
def send_whole_tensors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send and receive whole tensors if splitting them would give a single part."""
    from megatron import get_args
    from megatron.core import mpu

    given = get_args()
    if mpu.get_tensor_model_parallel_world_size() > 1 or not given.scatter_gather_tensors_in_pipeline:
        return original(*args, **kwargs)
    given.scatter_gather_tensors_in_pipeline = False
    try:
        return original(*args, **kwargs)
    finally:
        given.scatter_gather_tensors_in_pipeline = True
