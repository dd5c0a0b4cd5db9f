"""A block of attention on the NPU: ``npu_fusion_attention`` and its gradient, in layout SBH.

The operation returns the largest score and the divisor of each query instead of lse, eight times each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.reference import (
    Gradients,
    Residuals,
    attention_block,
    attention_block_backward,
)
from megatron_npu.ops.attention.npu import NpuCall, npu_call, shared_mask
from megatron_npu.ops.attention.spec import AttentionSpec, dense_segments
from megatron_npu.ops.dispatch import Unsupported


def plan(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> NpuCall | Unsupported:
    """Return the call of ``npu_fusion_attention``, or why it does not take the tensors."""
    segments = dense_segments(query.size(0), key.size(0), causal, (None, None), 0)
    spec = AttentionSpec("SBND", query.size(2), key.size(2), scale, segments)
    return npu_call(query.shape, key.shape, value.shape, query.dtype, spec)


def plan_backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool) -> NpuCall | Unsupported:
    """As ``plan``, from the residuals."""
    return plan(residuals.query, residuals.key, residuals.value, scale, causal)


@attention_block.on("npu", plan=plan)
def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, *, plan: NpuCall
) -> tuple[Tensor, Tensor]:
    """See ``reference.unfused``."""
    import torch_npu

    output, largest, divisor = torch_npu.npu_fusion_attention(
        *(t.flatten(2) for t in (query, key, value)),
        plan.head_num,
        plan.input_layout,
        atten_mask=shared_mask(plan.sparse_mode, query.device),
        scale=scale,
        sparse_mode=plan.sparse_mode,
    )[:3]
    return output.contiguous().view_as(query), largest[..., 0] + divisor[..., 0].log()


@attention_block_backward.on("npu", plan=plan_backward)
def backward(grad: Tensor, residuals: Residuals, scale: float, causal: bool, *, plan: NpuCall) -> Gradients:
    """See ``reference.unfused_backward``."""
    import torch_npu

    query, key, value, output, lse = residuals
    # exp(score - largest) / divisor is all that is made of the two: lse may stand for both
    largest = lse.unsqueeze(-1).expand(*lse.shape, 8).contiguous()
    grads = torch_npu.npu_fusion_attention_grad(
        *(t.flatten(2) for t in (query, key, value, grad)),
        plan.head_num,
        plan.input_layout,
        atten_mask=shared_mask(plan.sparse_mode, query.device),
        softmax_max=largest,
        softmax_sum=torch.ones_like(largest),
        attention_in=output.flatten(2),
        scale_value=scale,
        sparse_mode=plan.sparse_mode,
    )
    return grads[0].view_as(query), grads[1].view_as(key), grads[2].view_as(value)
