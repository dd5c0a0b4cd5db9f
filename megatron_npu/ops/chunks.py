"""Work in pieces that stay in a core's cache: what a chain of element-wise steps gains on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Of one fp32 piece. A chain works on two or three at a time, and a core's L2 cache has 1 to 2 MiB.
_PIECE_BYTES = 1 << 18


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices over ``rows`` rows of ``width`` values: a piece of cache for each thread at once."""
    step = max(1, _PIECE_BYTES * torch.get_num_threads() // (4 * max(width, 1)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
