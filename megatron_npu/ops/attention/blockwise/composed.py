"""Compute attention in tiles, with separate calls for matmuls, softmax and dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.attention.blockwise.dropout import TileDropout
from megatron_npu.ops.attention.blockwise.products import TileProducts, bf16_products
from megatron_npu.ops.attention.blockwise.softmax import TileSoftmax
from megatron_npu.ops.attention.blockwise.tiles import Tile, tiles
from megatron_npu.ops.attention.spec import AttentionSpec


class Composed:
    """Tiled attention for any dtype, with or without a mask.

    Args:
        spec: the call.
        mask: ``[b or 1, n or 1, sq or 1, sk or 1]``, True where masked; None means no mask.
        dropout: the call's dropout.
    """

    def __init__(self, spec: AttentionSpec, mask: Tensor | None, dropout: TileDropout) -> None:
        self._spec, self._mask, self._dropout = spec, mask, dropout
        self._buffers = Buffers()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor) -> None:
        """Write the attention output to ``result``.

        Args:
            q: ``[b · g, sq, r, d]``.
            k: ``[b · g, sk, 1, d]``.
            v: ``[b · g, sk, 1, dv]``.
            result: ``[b · g, sq, r, dv]``, zeros.
        """
        softmax, factors = self._steps(q)
        wide_q, wide_k = (t.to(factors.of_scores) for t in (q, k))  # once for all tiles
        with bf16_products(q.dtype):
            for tile in tiles(q.size(0), self._spec):
                dropped = self._weights(tile, softmax, factors, wide_q, wide_k)
                factors.write(tile.rows(result), dropped, tile.columns(v), self._dropout.gain)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``q``, ``k`` and ``v``.

        Those of ``k`` and ``v`` are in fp32 (or fp64).

        Args:
            q, k, v: see ``forward``.
            g: the gradient of the result.
        """
        softmax, factors = self._steps(q)
        wide_q, wide_k, wide_g, wide_v = (t.to(factors.of_scores) for t in (q, k, g, v))  # once for all tiles
        one_pass, gain, scale = softmax.rounds(q.dtype), self._dropout.gain, self._spec.scale
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(t, dtype=factors.sums) for t in (k, v))
        with bf16_products(q.dtype):
            for tile in tiles(q.size(0), self._spec):
                scores = softmax.scores_of(tile)
                rows, columns = tile.rows(wide_q), tile.columns(wide_k)
                if one_pass:
                    weights, kept = softmax.weights_of(tile), self._dropout.draw(tile.weights)
                    dropped = softmax.rounded_weights(tile, rows, columns, weights, kept)
                else:
                    weights = softmax.weights(tile, rows, columns)
                    dropped = factors.rounded("dropped", self._dropout.drop(weights, out=scores))
                factors.add(tile.columns(dv), dropped.mT, tile.rows(g), gain)
                factors.precise(scores, tile.rows(wide_g), tile.columns(wide_v), gain)
                if one_pass:
                    of_scores = softmax.rounded_backward(tile, scores, weights, kept)
                else:
                    self._dropout.drop_again(scores)
                    softmax.backward(scores, weights)
                    of_scores = factors.rounded("dropped", scores)
                factors.write(tile.rows(dq), of_scores, tile.columns(k), scale)
                factors.add(tile.columns(dk), of_scores.mT, tile.rows(q), scale)
        return dq, dk, dv

    def _steps(self, q: Tensor) -> tuple[TileSoftmax, TileProducts]:
        """Return the objects that compute the softmax and the matmuls of each tile, for the forward and
        backward passes.
        """
        factors = TileProducts(q.dtype, self._buffers)
        return TileSoftmax(self._spec, self._mask, factors, self._buffers), factors

    def _weights(
        self, tile: Tile, softmax: TileSoftmax, factors: TileProducts, wide_q: Tensor, wide_k: Tensor
    ) -> Tensor:
        """Return a tile's attention weights after dropout, in the dtype of the matmul operands."""
        rows, columns = tile.rows(wide_q), tile.columns(wide_k)
        if softmax.rounds(factors.dtype):
            return softmax.rounded_weights(tile, rows, columns, None, self._dropout.draw(tile.weights))
        weights = softmax.weights(tile, rows, columns)
        return factors.rounded("dropped", self._dropout.drop(weights, out=weights))
