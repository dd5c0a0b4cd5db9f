"""Compute attention with a sink: an extra score per head that takes part of the weight but has no value.

The sink allows a query to attend to nothing. A sink of zero gives softmax-off-by-one (Miller 2023), which
adds one to the divisor; gpt-oss has a learned sink. Given the lse without the sink, the sink scales the
output by exp(lse) / (exp(lse) + exp(sink)). The gradient is that of attention over a block of the keys, with
the logarithm of that sum in place of the lse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.attention import npu
from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.attention.layouts import bnsd_shape, from_bnsd, to_bnsd
from megatron_npu.ops.attention.reference import unfused
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.dispatch import Operation, Unsupported


def _reference(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> Tensor:
    """Compute ``reference.unfused`` with the sink ``[n]`` as one additional score for each query."""
    return unfused(query, key, value, spec, mask, sink)


operation = Operation(
    "attention_sink",
    _reference,
    group="attention",
    draws=lambda q, k, v, sink, spec, mask: spec.dropout_p > 0.0,
)


def absorb(output: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to an attention result that was computed without one. Return the new output and lse.

    Args:
        output: ``[s, b, n, d]``.
        lse: ``[b, n, s]`` in fp32; -inf for queries that have seen no key.
        sink: ``[n]`` in fp32.
    """
    total = torch.logaddexp(lse, sink.unsqueeze(-1))
    share = (lse - total).exp().permute(2, 0, 1).unsqueeze(-1)
    return (output * share).to(output.dtype), total


def gradient(grad: Tensor, output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of the sink, ``[n]``. The sink takes weight from every key and adds no value.

    Args:
        grad, output: gradient and output of the attention with the sink, ``[s, b, n, d]``.
        lse: log-sum-exp of the scores including the sink, ``[b, n, s]``.
        sink: ``[n]`` in fp32.
    """
    inner = (grad.to(lse.dtype) * output).sum(-1)
    weights = (sink.unsqueeze(-1) - lse).exp().permute(2, 0, 1)
    return -(weights * inner).sum((0, 1))


class _Absorbed(torch.autograd.Function):
    """Compute attention with a sink, ``[s, b, n, d]``, over all keys as a single block."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor, spec: AttentionSpec
    ) -> Tensor:
        output, lse, ctx.drawn = attention_block(query, key, value, spec)
        output, lse = absorb(output, lse, sink.to(lse.dtype))
        ctx.save_for_backward(query, key, value, output, lse, sink)
        ctx.spec = spec
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sink = ctx.saved_tensors
        residuals = Residuals(*tensors)
        grads = attention_block_backward(grad, residuals, ctx.spec, ctx.drawn)
        of_sink = None
        if ctx.needs_input_grad[3]:
            of_sink = gradient(grad, residuals.output, residuals.lse, sink.to(residuals.lse.dtype)).to(
                sink.dtype
            )
        return *(g.to(t.dtype) for g, t in zip(grads, tensors, strict=False)), of_sink, None


def _beyond_blocks(*arguments: Any) -> str | None:
    _, key, value, _, spec, mask = arguments
    if mask is not None:
        return "a sink cannot be combined with a mask"
    if any(segment.has_fully_masked_rows() for segment in spec.segments):
        return "a sink cannot be combined with queries that see no key"
    if bnsd_shape(key.shape, spec.layout, spec.key_heads) != bnsd_shape(
        value.shape, spec.layout, spec.key_heads
    ):
        return "a sink cannot be combined with keys and values of different head sizes"
    return None


@operation.on("cpu", "cuda", supports=_beyond_blocks)
def by_blocks(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> Tensor:
    """Compute attention without the sink in blocks, then add the sink."""
    query, key, value = (
        to_bnsd(t, spec.layout, heads).permute(2, 0, 1, 3)
        for t, heads in ((query, spec.heads), (key, spec.key_heads), (value, spec.key_heads))
    )
    output = _Absorbed.apply(query, key, value, sink, replace(spec, layout="SBND"))
    return from_bnsd(output.permute(1, 2, 0, 3), spec.layout).contiguous()


def plan_call(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, spec: AttentionSpec, mask: Tensor | None
) -> npu.NpuCall | Unsupported:
    """Return the kernel arguments for ``spec``, or the reason why the kernel does not support it; see
    ``npu.plan_call``.

    A sink adds no limits.
    """
    return npu.plan_call(query, key, value, spec, mask)


@operation.on("npu", plan=plan_call)
def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    spec: AttentionSpec,
    mask: Tensor | None,
    *,
    plan: npu.NpuCall,
) -> Tensor:
    """Pass the sink to ``npu_fusion_attention_v2`` in fp32, as the documentation of torch_npu 2.13
    requires.
    """
    return npu.attend(query, key, value, spec, mask, plan=plan, sink=sink.float())
