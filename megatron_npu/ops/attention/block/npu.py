"""Compute attention over one block of keys on the NPU, and its gradients, with ``npu_fusion_attention``.

Packed sequences use TND. The operation returns the maximum and the sum of each softmax row, eight copies of
each, instead of lse. With dropout it also returns the seed, the offset and the number of weights, from which
the gradient recreates the mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.attention.block.reference import (
    Drawn,
    Gradients,
    Residuals,
    attention_block,
    attention_block_backward,
)
from megatron_npu.ops.attention.npu import NpuCall, npu_call, shared_mask
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.dispatch import Unsupported


def plan(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> NpuCall | Unsupported:
    """Return the arguments for ``npu_fusion_attention``, or the reason why it does not support the
    tensors.
    """
    if spec.packed:
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        spec = replace(spec, layout="TND")
    return npu_call(query.shape, key.shape, value.shape, query.dtype, spec)


def plan_backward(
    grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn
) -> NpuCall | Unsupported:
    """Return the arguments of the backward call of ``npu_fusion_attention``, given the saved tensors of
    the forward pass.
    """
    return plan(residuals.query, residuals.key, residuals.value, spec)


@attention_block.on("npu", plan=plan)
def forward(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, *, plan: NpuCall
) -> tuple[Tensor, Tensor, Drawn]:
    """Compute attention over one block of keys; see ``reference.unfused``."""
    import torch_npu

    output, largest, divisor, _, *drawn = torch_npu.npu_fusion_attention(
        *(_joined(t, plan) for t in (query, key, value)),
        plan.head_num,
        plan.input_layout,
        scale=spec.scale,
        **_options(plan, query),
    )
    lse = largest[..., 0] + divisor[..., 0].log()
    lse = lse.t().unsqueeze(0).contiguous() if plan.cu_seqlens else lse
    return output.contiguous().view_as(query), lse, tuple(drawn) if spec.dropout_p else ()


@attention_block_backward.on("npu", plan=plan_backward)
def backward(
    grad: Tensor, residuals: Residuals, spec: AttentionSpec, drawn: Drawn, *, plan: NpuCall
) -> Gradients:
    """Compute the gradients of attention over one block of keys; see ``reference.unfused_backward``."""
    import torch_npu

    query, key, value, output, lse = residuals
    # exp(score - largest) / divisor is all that is made of the two: lse may stand for both
    lse = lse[0].t() if plan.cu_seqlens else lse
    largest = lse.unsqueeze(-1).expand(*lse.shape, 8).contiguous()
    again = dict(zip(("seed", "offset", "numels"), drawn, strict=True)) if drawn else {}
    grads = torch_npu.npu_fusion_attention_grad(
        *(_joined(t, plan) for t in (query, key, value, grad)),
        plan.head_num,
        plan.input_layout,
        softmax_max=largest,
        softmax_sum=torch.ones_like(largest),
        attention_in=_joined(output, plan),
        scale_value=spec.scale,
        **_options(plan, query),
        **again,
    )
    return grads[0].view_as(query), grads[1].view_as(key), grads[2].view_as(value)


def _joined(tensor: Tensor, plan: NpuCall) -> Tensor:
    """Reshape ``[s, b, n, d]`` to ``[s, b, n * d]``, or to ``[t, n, d]`` for packed sequences in a batch
    of one.
    """
    return tensor.squeeze(1) if plan.cu_seqlens else tensor.flatten(2)


def _options(plan: NpuCall, query: Tensor) -> dict[str, Any]:
    """Return the kernel arguments that the forward and backward passes have in common."""
    options: dict[str, Any] = {
        "atten_mask": shared_mask(plan.sparse_mode, query.device),
        "keep_prob": plan.keep_prob,
        "pre_tockens": plan.pre_tockens,
        "next_tockens": plan.next_tockens,
        "sparse_mode": plan.sparse_mode,
    }
    if plan.cu_seqlens:
        ends = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), map(list, plan.cu_seqlens), strict=True))
        options |= {**ends, "softmax_layout": "TND"}  # rows of tokens: else by head within each sequence
    return options
