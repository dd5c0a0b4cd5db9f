"""Tiles that one kernel of ours computes, where it multiplies bf16 as fast as anything here."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_npu.ops import compiled
from megatron_npu.ops.attention.blockwise.dropout import TileDropout
from megatron_npu.ops.attention.blockwise.products import is_ours
from megatron_npu.ops.attention.blockwise.tiles import Tile, tiles
from megatron_npu.ops.attention.spec import AttentionSpec, Segment
from megatron_npu.ops.compiled import attention

# The fewer rows, the less of a tile is beyond the diagonal; the more, the more a packed panel of keys serves.
# Measured with two cores of a Zen 4, heads of 64, and 256 to 2,048 tokens.
_ROWS, _ROWS_OF_ALL_KEYS = 64, 256


def takes(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether a call with such queries is one for the kernel, which knows no mask."""
    return mask is None and compiled.is_plain(query) and compiled.available() and is_ours(query.dtype)


class Fused:
    """All tiles of a call in bf16; otherwise as ``composed.Composed``, without a mask."""

    def __init__(self, spec: AttentionSpec, dropout: TileDropout) -> None:
        self._spec, self._dropout = spec, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, result: Tensor) -> None:
        """Write the attention to ``result``; shapes as for ``Composed``."""
        for tile in self._tiles(q):
            attention.forward(self._factors(tile, q, k, v), _seen(tile), tile.rows(result))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, grads: tuple[Tensor, ...]) -> None:
        """Write the gradients to ``grads``; shapes as for ``Composed``."""
        dq, dk, dv = grads
        for tile in self._tiles(q):
            of_tile = (tile.rows(g), tile.rows(dq), tile.columns(dk), tile.columns(dv))
            attention.backward(self._factors(tile, q, k, v), _seen(tile), *of_tile)

    def _tiles(self, q: Tensor) -> Iterator[Tile]:
        return tiles(q.size(0), self._spec, _most_rows)

    def _factors(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> attention.Factors:
        gain, kept = self._dropout.gain, self._dropout.draw(tile.weights)
        factors = (tile.rows(q), tile.columns(k), tile.columns(v))
        return attention.Factors(*factors, self._spec.scale, gain, kept)


def _most_rows(segment: Segment) -> int:
    return _ROWS_OF_ALL_KEYS if segment.sees_all_keys() else _ROWS


def _seen(tile: Tile) -> attention.Seen:
    left, right = tile.segment.window_left, tile.segment.window_right
    begin = None if left is None else tile.q0 - left - tile.k0
    end = None if right is None else tile.q0 + right + 1 - tile.k0
    return attention.Seen(begin, end, tile.repeats)
