"""Runs of queries of a block against the keys they see: scratch memory does not grow with the block."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_npu.ops.attention.spec import Segment

ROWS = 128  # queries of a tile


def row_tiles(segment: Segment, rows: int = ROWS) -> Iterator[Segment]:
    """Yield ``segment`` in runs of up to ``rows`` queries, each with the keys that some of them see.

    A run that sees no key is left out. A limit that forbids nothing within a tile is None there.
    """
    for first in range(0, segment.q1 - segment.q0, rows):
        last = min(first + rows, segment.q1 - segment.q0)
        begin, end = segment.visible_keys(first, last)
        if begin < end:
            yield _tile(segment, first, last, begin, end)


def _tile(segment: Segment, first: int, last: int, begin: int, end: int) -> Segment:
    left, right = segment.window_left, segment.window_right
    left = None if left is None else left - first + begin
    right = None if right is None else right + first - begin
    return Segment(
        segment.q0 + first,
        segment.q0 + last,
        segment.k0 + begin,
        segment.k0 + end,
        None if left is None or left >= last - first - 1 else left,
        None if right is None or right >= end - begin - 1 else right,
    )
