"""Compute attention over one block of keys on CUDA with torch's flash kernel.

This has not been run on a GPU yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.heads import heads_first, heads_third, regroup, ungroup
from megatron_npu.ops.attention.block.reference import (
    Drawn,
    Gradients,
    Residuals,
    attention_block,
    attention_block_backward,
)
from megatron_npu.ops.attention.spec import AttentionSpec


def _beyond_flash(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str | None:
    if len(spec.segments) > 1 or spec.dropout_p or not spec.segments[0].is_plain:
        return "blocks use torch's flash kernel only without packed sequences, a window or dropout"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"torch's flash kernel supports only fp16 and bf16, but the query is {query.dtype}"
    sizes = {t.size(3) for t in (query, key, value)}
    if len(sizes) > 1 or query.size(3) % 8 or query.size(3) > 256:
        return (
            "torch's flash kernel requires a single head size that is a multiple of 8 up to 256, but "
            f"got {sorted(sizes)}"
        )
    return None


def _beyond_flash_backward(
    grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn
) -> str | None:
    return _beyond_flash(residuals.query, residuals.key, residuals.value, spec)


@attention_block.on("cuda", supports=_beyond_flash)
def forward(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Drawn]:
    """Compute attention over one block of keys; see ``reference.unfused``."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    causal = spec.segments[0].window_right == 0
    output, lse = kernel(*ungroup(query, key, value), 0.0, causal, False, scale=spec.scale)[:2]
    return heads_third(output).contiguous(), lse, ()


@attention_block_backward.on("cuda", supports=_beyond_flash_backward)
def backward(grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn) -> Gradients:
    """Compute the gradients of attention over one block of keys; see ``reference.unfused_backward``."""
    query, key, value, output, lse = residuals
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    tensors = ungroup(query, key, value)
    lengths = None, None, query.size(0), key.size(0)  # None: not packed
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout, of which there is none
    options = (*lengths, 0.0, spec.segments[0].window_right == 0, seed, seed)
    grads = kernel(heads_first(grad), *tensors, heads_first(output), lse, *options, scale=spec.scale)
    return regroup(grads, key.size(2), key.dtype)
