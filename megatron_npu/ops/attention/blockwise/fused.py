"""Compute attention with a single compiled kernel on processors where its matmuls are as fast as separate
ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_npu.ops import compiled
from megatron_npu.ops.attention.blockwise.dropout import keep_of
from megatron_npu.ops.attention.blockwise.products import factor_dtype
from megatron_npu.ops.attention.blockwise.tiles import Tile
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.compiled import attention
from megatron_npu.ops.dropout import KEEP_LEVELS


def takes(query: Tensor, mask: Tensor | None) -> bool:
    """Return True if the compiled kernel supports the given queries. The kernel does not support masks."""
    plain = mask is None and compiled.is_plain(query)
    return plain and compiled.available() and attention.takes(factor_dtype(query.dtype))


class Fused:
    """Tiled attention in fp32 or bf16 without a mask, computed by a single compiled kernel.

    Args:
        spec: the call.
        seed: seed of the dropout.
    """

    def __init__(self, spec: AttentionSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor) -> Tensor:
        """Write the attention output to ``result``.

        Return the normalizer ``[b · g, sq, r, 1]`` (base 2, fp32).

        Args:
            q: ``[b · g, sq, r, d]``.
            k: ``[b · g, sk, 1, d]``.
            v: ``[b · g, sk, 1, dv]``.
            result: ``[b · g, sq, r, dv]``, zeros.
        """
        normalizer = torch.empty(*q.shape[:3], 1, dtype=torch.float32, device="cpu")
        for tile, weighting in self._segments(q):
            outputs = tile.rows(result), tile.rows(normalizer)
            attention.forward(_factors(tile, q, k, v), weighting, *outputs)
        return normalizer

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, result: tuple[Tensor, Tensor], g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of ``q``, ``k`` and ``v``.

        Args:
            q, k, v: see ``forward``.
            result: the attention that ``forward`` wrote, and the tensor that it returned.
            g: the gradient of the attention.
        """
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile, weighting in self._segments(q):
            written = tile.rows(result[0]), tile.rows(result[1])
            of_tile = tile.rows(grads[0]), tile.columns(grads[1]), tile.columns(grads[2])
            attention.backward(_factors(tile, q, k, v), weighting, written, tile.rows(g), of_tile)
        return grads

    def _segments(self, q: Tensor) -> Iterator[tuple[Tile, attention.Weighting]]:
        """Yield the visible part of each segment with a description of how its attention weights are
        computed.
        """
        spec, keep = self._spec, keep_of(self._spec.dropout_p)
        repeats = spec.heads // spec.key_heads
        for number, segment in enumerate(spec.segments):
            q0, q1 = segment.rows_with_keys()
            if q0 == q1:
                continue
            k0, k1 = segment.visible_keys(q0, q1)
            left, right = segment.window_left, segment.window_right
            begin = None if left is None else q0 - left - k0
            end = None if right is None else q0 + right + 1 - k0
            dropout = (self._seed + (number << 32), keep, KEEP_LEVELS / keep)
            weighting = attention.Weighting(begin, end, repeats, spec.scale, *dropout)
            yield Tile(segment, 0, q.size(0), q0, q1, k0, k1, repeats), weighting


def _factors(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> attention.Factors:
    return attention.Factors(tile.rows(q), tile.columns(k), tile.columns(v))
