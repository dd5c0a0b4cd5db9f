"""Define the differentiable tiled attention function, its memory layout and its precision.

The backward pass recomputes the softmax instead of saving it (Chen et al. 2016; its gradient as in Dao et al.
2022, FlashAttention, appendix B).

Internally, queries have the shape ``[b · g, s, r, d]``, for b batches, g key heads and r query heads per key
head; keys have r = 1.

Scores and softmax are computed in fp32. On processors with fast bf16 matmuls, bf16 tensors stay bf16, weights
and score gradients are rounded to bf16 before they are multiplied (as in any bf16 kernel), and sums over
tiles are fp32. On other processors everything is computed in fp32 (or in fp64 for fp64 tensors).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.attention.blockwise import fused
from megatron_npu.ops.attention.blockwise.composed import Composed
from megatron_npu.ops.attention.blockwise.dropout import TileDropout
from megatron_npu.ops.attention.blockwise.fused import Fused
from megatron_npu.ops.attention.blockwise.products import factor_dtype, multiplies_strided
from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.compiled import is_plain


def blockwise(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Return the attention that ``spec`` describes as a contiguous tensor in its layout, differentiable once.

    Args:
        query: in the layout of ``spec``, as are ``key`` and ``value``; any float dtype, on the CPU.
        key: see ``query``.
        value: see ``query``; its head size may differ.
        spec: the call.
        mask: ``[b or 1, n or 1, sq or 1, sk or 1]``, True where masked; None means no mask.
    """
    return _Blockwise.apply(query, key, value, spec, mask)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None
    ) -> Tensor:
        ctx.spec, ctx.mask = spec, mask
        # One draw from the default generator, which Megatron's RNG tracker has put in place, decides every
        # mask of this call: a recomputed forward and the backward drop the same weights.
        ctx.seed = int(torch.randint(2**62, (), device="cpu")) if spec.dropout_p else 0
        ctx.by_one_kernel = fused.takes(query, mask) and is_plain(key) and is_plain(value)
        q, k, v = _all_grouped(ctx, query, key, value)
        # in the order of the query's memory, which is the layout's where heads are not copied
        result = torch.zeros_like(q) if q.size(-1) == v.size(-1) else q.new_zeros(*q.shape[:-1], v.size(-1))
        normalizer = None
        if ctx.by_one_kernel:
            normalizer = Fused(spec, ctx.seed).forward(q, k, v, result)
        else:
            _composed(ctx).forward(q, k, v, result)
        output = _ungrouped(result, spec, query.dtype).data  # no view, which nobody may change in place
        ctx.save_for_backward(query, key, value, *(() if normalizer is None else (output, normalizer)))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *result = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        q, k, v = _all_grouped(ctx, query, key, value)
        g = _grouped(grad, spec, spec.heads, ctx.by_one_kernel)
        if ctx.by_one_kernel:
            output = _grouped(result[0], spec, spec.heads, by_one_kernel=True)
            grads = Fused(spec, ctx.seed).backward(q, k, v, (output, result[1]), g)
        else:
            grads = _composed(ctx).backward(q, k, v, g)
        return (*(_ungrouped(t, spec, query.dtype) for t in grads), None, None)


def _composed(ctx: Any) -> Composed:
    return Composed(ctx.spec, ctx.mask, TileDropout(ctx.spec.dropout_p, ctx.seed))


def _all_grouped(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec: AttentionSpec = ctx.spec
    q = _grouped(query, spec, spec.heads, ctx.by_one_kernel)
    k, v = (_grouped(t, spec, spec.key_heads, ctx.by_one_kernel) for t in (key, value))
    return q, k, v


def _grouped(tensor: Tensor, spec: AttentionSpec, heads: int, by_one_kernel: bool) -> Tensor:
    """Reshape a query, key or value tensor to ``[b · g, s, r, d]`` in the dtype of the matmul operands.

    The result is contiguous unless the matmuls support strides.
    """
    bnsd = to_bnsd(tensor.resolve_neg(), spec.layout, heads)
    grouped = bnsd.unflatten(1, (spec.key_heads, -1)).transpose(2, 3)
    dtype = factor_dtype(tensor.dtype)
    if multiplies_strided(grouped, by_one_kernel):
        return grouped.flatten(0, 1)
    return grouped.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(0, 1)


def _ungrouped(grouped: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Undo ``_grouped``, and return a contiguous tensor in the layout of the original attention call."""
    bnsd = grouped.unflatten(0, (-1, spec.key_heads)).transpose(2, 3).flatten(1, 2)
    return from_bnsd(bnsd, spec.layout).to(dtype, memory_format=torch.contiguous_format).contiguous()
