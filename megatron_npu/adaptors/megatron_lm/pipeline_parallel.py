"""What travels between the stages of a pipeline."""

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
    """Gather the values alone; the callers mark the result as a leaf themselves."""
    return original(tensor.detach())
