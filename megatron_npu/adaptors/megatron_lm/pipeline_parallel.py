"""Patch the communication of tensors between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA


@around(
    "megatron.core.tensor_parallel.utils:gather_split_1d_tensor",
    devices=WITHOUT_CUDA,
    why="while the input requires grad, autograd rejects gloo's writes into views of the gathered tensor, "
    "and with HCCL treats the result as having no gradient",
)
def gather_without_grad(original: Callable[..., Any], tensor: Tensor) -> Any:
    """Gather tensors outside autograd.

    The callers mark the result as a leaf.
    """
    return original(tensor.detach())


@around(
    "megatron.p2p_communication:_communicate",
    why=(
        "with one tensor-parallel rank upstream gathers received tensors from a group of that rank alone:"
        " a collective and a copy per tensor, and a communicator, although the result is bitwise "
        "identical; the calls were counted on the simulated NPU, and no time was measured"
    ),
)
def send_whole_tensors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send and receive whole tensors if splitting them would result in a single part."""
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
