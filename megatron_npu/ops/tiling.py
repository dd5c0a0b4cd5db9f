"""Work in pieces that stay in a core's cache: what a chain of element-wise steps gains on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Of one piece in fp32. A chain works on three or four at a time, and a core's L2 cache has 1 to 2 MiB.
_PIECE_BYTES = 1 << 18


def rows_per_piece(width: int) -> int:
    """Return how many rows of ``width`` values make a piece of cache for each thread."""
    return max(1, _PIECE_BYTES * torch.get_num_threads() // (4 * max(width, 1)))


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices over ``rows`` rows of ``width`` values."""
    step = rows_per_piece(width)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of ``[n, h]`` tensors, piece by piece; the widest one sets how many."""
    step = rows_per_piece(max(tensor.size(-1) for tensor in tensors))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


def scratch(count: int, like: Tensor, dtype: torch.dtype, step: int | None = None) -> list[Tensor]:
    """Return ``count`` buffers for one piece of ``like``, which is as wide as the widest of ``pieces``.

    ``step`` is the number of rows of a piece, if not that of ``rows_per_piece``.
    """
    width = like.size(-1)
    rows = min(step or rows_per_piece(width), max(1, like.numel() // max(width, 1)))
    return [torch.empty((rows, width), dtype=dtype, device=like.device) for _ in range(count)]
