"""Process consecutive queries together with the keys that they attend to, so that scratch memory stays
constant.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_npu.ops.attention.spec import Segment

ROWS = 128  # queries of a tile


def row_tiles(segment: Segment, rows: int = ROWS) -> Iterator[Segment]:
    """Yield ranges of up to ``rows`` consecutive queries of ``segment``.

    Each run includes all keys that any of its queries attends to.

    Runs that see no key are skipped. A window limit that hides nothing within a tile becomes None.
    """
    for first in range(0, segment.q1 - segment.q0, rows):
        last = min(first + rows, segment.q1 - segment.q0)
        tile = segment.part(first, last)
        if tile is not None:
            yield tile
