"""The differentiable function over all tiles, and its memory layout and precision.

Backward recomputes softmax instead of saving anything (Chen et al. 2016; the gradient of softmax as in Dao et
al. 2022, FlashAttention, appendix B).

Inside, queries are ``[b · g, s, r, d]``: g key heads of b batches, r query heads for each; keys have r = 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.attention.blockwise.dropout import TileDropout
from megatron_npu.ops.attention.blockwise.softmax import TileSoftmax
from megatron_npu.ops.attention.blockwise.tiles import Tile, tiles
from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd
from megatron_npu.ops.attention.spec import AttentionSpec


def blockwise(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Return the attention that ``spec`` describes, contiguous in its layout; differentiable once.

    Args:
        query: in the layout of ``spec``, as are ``key`` and ``value``; any float dtype, on the CPU.
        key: see ``query``.
        value: see ``query``; its head size may differ.
        spec: what is asked for.
        mask: ``[b or 1, n or 1, sq or 1, sk or 1]``, True where masked; None without.
    """
    return _Blockwise.apply(query, key, value, spec, mask)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.spec, ctx.mask = spec, mask
        # One draw from the default generator, which Megatron's RNG tracker has put in place, decides every
        # mask of this call: a recomputed forward and the backward drop the same weights.
        ctx.seed = int(torch.randint(2**62, (), device="cpu")) if spec.dropout_p else 0
        q = _grouped(query, spec, spec.heads)
        k, v = (_grouped(t, spec, spec.key_heads) for t in (key, value))
        result = q.new_zeros(*q.shape[:-1], v.size(-1))
        softmax, dropout = _tile_steps(ctx, q.dtype)
        with bf16_products(query.dtype):
            for tile in tiles(q.size(0), query.dtype, spec):
                weights = softmax.weights(tile, tile.rows(q), tile.columns(k))
                output = tile.rows(result)
                dropped = dropout.drop(weights, out=weights)
                torch.baddbmm(output, dropped, tile.columns(v), beta=0, alpha=dropout.gain, out=output)
        return _ungrouped(result, spec, query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        spec: AttentionSpec = ctx.spec
        q, g = (_grouped(t, spec, spec.heads) for t in (query, grad))
        k, v = (_grouped(t, spec, spec.key_heads) for t in (key, value))
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        softmax, dropout = _tile_steps(ctx, q.dtype)
        with bf16_products(query.dtype):
            for tile in tiles(q.size(0), query.dtype, spec):
                _tile_backward(tile, softmax, dropout, (q, k, v, g), (dq, dk, dv), spec.scale)
        return (*(_ungrouped(t, spec, query.dtype) for t in (dq, dk, dv)), None, None)


def _tile_steps(ctx: Any, dtype: torch.dtype) -> tuple[TileSoftmax, TileDropout]:
    """Return what forward and backward do alike for each tile, with buffers of their own."""
    buffers = Buffers()
    return TileSoftmax(ctx.spec, ctx.mask, dtype, buffers), TileDropout(ctx.spec.dropout_p, ctx.seed, buffers)


def _tile_backward(
    tile: Tile,
    softmax: TileSoftmax,
    dropout: TileDropout,
    tensors: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    scale: float,
) -> None:
    """Write the queries' gradient of one tile and add to its keys' and values'."""
    (q, k, v, g), (dq, dk, dv) = tensors, gradients
    rows, columns, values, grad = tile.rows(q), tile.columns(k), tile.columns(v), tile.rows(g)
    weights = softmax.weights(tile, rows, columns)
    scores = softmax.scores_of(tile)
    dropped = dropout.drop(weights, out=scores)
    tile.columns(dv).baddbmm_(dropped.mT, grad, alpha=dropout.gain)
    torch.baddbmm(scores, grad, values.mT, beta=0, alpha=dropout.gain, out=scores)
    dropout.drop_again(scores)
    torch.ops.aten._softmax_backward_data.out(scores, weights, -1, weights.dtype, grad_input=scores)
    query_grad = tile.rows(dq)
    torch.baddbmm(query_grad, scores, columns, beta=0, alpha=scale, out=query_grad)
    tile.columns(dk).baddbmm_(scores.mT, rows, alpha=scale)


def _grouped(tensor: Tensor, spec: AttentionSpec, heads: int) -> Tensor:
    """Return ``[b · g, s, r, d]``, contiguous, in fp32 (fp64 stays fp64)."""
    bnsd = to_bnsd(tensor, spec.layout, heads)
    grouped = bnsd.unflatten(1, (spec.key_heads, -1)).transpose(2, 3)
    precise = torch.promote_types(tensor.dtype, torch.float32)
    return grouped.to(precise, memory_format=torch.contiguous_format).contiguous().flatten(0, 1)


def _ungrouped(grouped: Tensor, spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Undo ``_grouped``: contiguous in the layout of the call."""
    bnsd = grouped.unflatten(0, (-1, spec.key_heads)).transpose(2, 3).flatten(1, 2)
    return from_bnsd(bnsd, spec.layout).to(dtype, memory_format=torch.contiguous_format).contiguous()


@contextlib.contextmanager
def bf16_products(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN round the factors of fp32 matrix products to bf16 where ``dtype``, the call's, is bf16.

    Queries, keys and values lose nothing by it, weights are rounded as in any bf16 kernel, sums and softmax
    stay fp32; on a processor with AMX or AVX512-BF16 the products take half the time. The switch is the
    process's, hence off again at once; where torch has none the products stay fp32.
    """
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if dtype is not torch.bfloat16 or switch is None:
        yield
        return
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
