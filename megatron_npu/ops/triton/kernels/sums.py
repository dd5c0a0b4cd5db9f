"""Sum over rows in a fixed order in two stages: first within chunks of rows, then over the chunks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_chunks(x, partial, rows, width, per, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``[rows, width]`` over chunks of ``per`` rows, giving fp32 ``[chunks, width]``, the first of
    two stages.
    """
    first = tl.program_id(0).to(tl.int64) * per
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    tile = row[:, None] * width + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, per, ROWS):
        inside = (row[:, None] < rows - first - begin) & (column[None, :] < width)
        sums += tl.load(x + (first + begin) * width + tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(sums, 0), mask=column < width)


@triton.jit
def of_columns(partial, out, chunks, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum fp32 ``[chunks, width]`` over the chunks, giving ``[width]``, the second of two stages."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, chunks, ROWS):
        inside = (row[:, None] < chunks - begin) & (column[None, :] < width)
        sums += tl.load(partial + (begin + row[:, None]) * width + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(sums, 0), mask=column < width)
