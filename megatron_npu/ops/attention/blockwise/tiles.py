"""Split the visible query-key pairs into tiles: consecutive queries with all keys that they attend to.

A tile contains whole rows of scores, so the softmax needs no running maximum. Work and memory grow with
queries × visible keys; a tile has at most ``TILE_AREA`` elements, or one row of scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from megatron_npu.ops.attention.spec import AttentionSpec, Segment

# Measured with one core and heads of 64. On a Xeon with AMX fp32 is slower with other numbers; on an EPYC
# bf16 is 15 % faster than with 256 rows where there are 256 tokens, and 5 % slower where there are 2,048.
# Scratch of 2^18 elements costs up to 10 %, and beyond 2^20 nothing is gained.
TILE_ROWS = 128
# Where every query sees every key, there is no corner to leave out, and longer runs are products of fewer
# calls whose keys' gradients are added up less often: 10 % faster than 128 (512 and 2,048 tokens, an EPYC).
TILE_ROWS_OF_ALL_KEYS = 512
TILE_AREA = 1 << 20


class Tile(NamedTuple):
    """A tile of an attention call: heads ``[h0, h1)``, and queries ``[q0, q1)`` over keys ``[k0, k1)`` of one
    segment.

    The heads are the b · g key heads of all batches; each of them has ``repeats`` query heads.
    """

    segment: Segment
    h0: int
    h1: int
    q0: int
    q1: int
    k0: int
    k1: int
    repeats: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the tile's scores: heads, queries (times query heads per key head), and keys."""
        return self.h1 - self.h0, (self.q1 - self.q0) * self.repeats, self.k1 - self.k0

    @property
    def weights(self) -> int:
        """The number of attention weights in the tile."""
        heads, rows, keys = self.shape
        return heads * rows * keys

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view of ``[b · g, s, r, d]`` with the shape ``[heads, queries · r, d]``."""
        start = self.segment.q0
        return tensor[self.h0 : self.h1, start + self.q0 : start + self.q1].flatten(1, 2)

    def columns(self, tensor: Tensor) -> Tensor:
        """Return a view of ``[b · g, s, 1, d]`` with the shape ``[heads, keys, d]``."""
        start = self.segment.k0
        return tensor[self.h0 : self.h1, start + self.k0 : start + self.k1].flatten(1, 2)


def most_rows(segment: Segment) -> int:
    """Return the maximum number of rows in a tile, counted as queries times query heads per key head."""
    return TILE_ROWS_OF_ALL_KEYS if segment.sees_all_keys() else TILE_ROWS


def tiles(heads: int, spec: AttentionSpec) -> Iterator[Tile]:
    """Yield the tiles that cover the visible part of every segment, always in the same order.

    Args:
        heads: number of key heads of all batches.
        spec: the call.
    """
    repeats = spec.heads // spec.key_heads
    # a mask may differ between batches: then the heads of one tile come from one batch
    span = spec.key_heads if spec.masked else heads
    for segment in spec.segments:
        rows = max(1, most_rows(segment) // repeats)
        begin, last = segment.rows_with_keys()
        while begin < last:
            end = _end_of_tile(segment, begin, min(last, begin + rows), repeats)
            k0, k1 = segment.visible_keys(begin, end)
            together = max(1, TILE_AREA // ((end - begin) * repeats * (k1 - k0)))
            for first in range(0, heads, span):
                for h0 in range(first, first + span, together):
                    h1 = min(h0 + together, first + span)
                    yield Tile(segment, h0, h1, begin, end, k0, k1, repeats)
            begin = end


def _end_of_tile(segment: Segment, begin: int, end: int, repeats: int) -> int:
    """Return ``end``, or a smaller value if queries ``[begin, end)`` attend to too many keys for one tile."""
    k0, k1 = segment.visible_keys(begin, end)
    return min(end, begin + max(1, TILE_AREA // (repeats * (k1 - k0))))
