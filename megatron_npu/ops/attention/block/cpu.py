"""A block of attention on the CPU: torch's flash kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.heads import heads_first, heads_third, regroup, ungroup
from megatron_npu.ops.attention.block.reference import (
    Gradients,
    Residuals,
    attention_block,
    attention_block_backward,
)


@attention_block.on("cpu")
def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See ``reference.unfused``."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(*ungroup(query, key, value), 0.0, causal, scale=scale)
    return heads_third(output).contiguous(), lse


@attention_block_backward.on("cpu")
def backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool) -> Gradients:
    """See ``reference.unfused_backward``."""
    query, key, value, output, lse = residuals
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = ungroup(query, key, value)
    grads = kernel(heads_first(grad), *tensors, heads_first(output), lse, 0.0, causal, scale=scale)
    return regroup(grads, key.size(2), key.dtype)
