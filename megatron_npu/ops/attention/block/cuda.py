"""A block of attention on CUDA: torch's flash kernel. Written without a GPU at hand."""

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


def _beyond_flash(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> str | None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}: torch's flash kernel has fp16 and bf16"
    sizes = {t.size(3) for t in (query, key, value)}
    if len(sizes) > 1 or query.size(3) % 8 or query.size(3) > 256:
        return f"head sizes {sorted(sizes)}: torch's flash kernel has one size, a multiple of 8 up to 256"
    return None


def _beyond_flash_backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool) -> str | None:
    return _beyond_flash(residuals.query, residuals.key, residuals.value, scale, causal)


@attention_block.on("cuda", supports=_beyond_flash)
def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """See ``reference.unfused``."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, lse = kernel(*ungroup(query, key, value), 0.0, causal, False, scale=scale)[:2]
    return heads_third(output).contiguous(), lse


@attention_block_backward.on("cuda", supports=_beyond_flash_backward)
def backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool) -> Gradients:
    """See ``reference.unfused_backward``."""
    query, key, value, output, lse = residuals
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    tensors = ungroup(query, key, value)
    lengths = None, None, query.size(0), key.size(0)  # None: not packed
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout, of which there is none
    options = (*lengths, 0.0, causal, seed, seed)
    grads = kernel(heads_first(grad), *tensors, heads_first(output), lse, *options, scale=scale)
    return regroup(grads, key.size(2), key.dtype)
