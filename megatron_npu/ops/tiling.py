"""Choose tiles of rows that fit in a core's cache, for chains of elementwise operations on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Of one tile in fp32. A chain works on three or four at a time, and a core's L2 cache has 1 to 2 MiB.
_TILE_BYTES = 1 << 18
# Of one tile in fp32 for all threads together, where rows are long: a few of 50,000 values. Devices with
# kernels to launch for each tile get larger ones.
_WHOLE_ROWS_BYTES, _TIMES_OFF_CPU = 1 << 20, 32


def rows_per_tile(width: int) -> int:
    """Return the number of rows, each of ``width`` values, that make up one tile for each thread."""
    return max(1, _TILE_BYTES * torch.get_num_threads() // (4 * max(width, 1)))


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of one tile each that together cover ``rows`` rows of ``width`` values."""
    return _slices(rows, rows_per_tile(width))


def whole_row_slices(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows, as ``row_slices`` does, for operations that reduce long rows.

    All threads get the same number of rows.
    """
    row_bytes = 4 * max(width, 1)
    if device.type != "cpu":
        return _slices(rows, max(1, _TIMES_OFF_CPU * _WHOLE_ROWS_BYTES // row_bytes))
    threads = torch.get_num_threads()
    return _slices(rows, max(1, _WHOLE_ROWS_BYTES // row_bytes // threads) * threads)


def _slices(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def scratch_buffers(count: int, like: Tensor, dtype: torch.dtype, step: int) -> list[Tensor]:
    """Return ``count`` scratch buffers, each for one tile of the tensor ``like``.

    A tile has ``step`` rows.
    """
    width = like.size(-1)
    rows = min(step, max(1, like.numel() // max(width, 1)))
    return [torch.empty((rows, width), dtype=dtype, device=like.device) for _ in range(count)]
