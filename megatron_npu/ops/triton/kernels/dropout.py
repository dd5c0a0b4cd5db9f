"""Add a bias, apply dropout and add a residual, with one kernel per direction.

The backward pass recomputes the mask, so that no mask is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed, row, width, level, COLUMNS: tl.constexpr, first_column):
    """Return a mask ``[n, COLUMNS]`` of the values that dropout keeps in n rows, starting at column
    ``first_column``.

    Every four neighbors in a row share one Philox draw, whose number is their index in the whole tensor, so
    that the decision about a value does not depend on how the tensor is tiled.

    Args:
        level: a value is kept if its 31 bits are below this number.
    """
    four = first_column // 4 + tl.arange(0, COLUMNS // 4)
    number = row[:, None] * ((width + 3) // 4) + four[None, :]
    a, b, c, d = tl.randint4x(seed, number)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (bits & 0x7FFFFFFF).to(tl.int32) < level


@triton.jit
def bias_dropout_add(
    x, bias, residual, out, seeds, rows, width, level, scale,
    BIAS: tl.constexpr, DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write ``residual + dropout(x + bias)`` to the output.

    All tensors are ``[rows, width]`` except the bias ``[width]``.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    at = first * width + row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows - first) & (column[None, :] < width)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if DROP:
        keeps = kept(tl.load(seeds), first + row, width, level, COLUMNS, tl.program_id(1) * COLUMNS)
        value = tl.where(keeps, value * scale, 0.0)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask=inside)


@triton.jit
def dropped_gradient(
    grad, d_x, partial, seeds, rows, width, per, level, scale,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``x`` and, if there is a bias, partial sums of that gradient."""
    first = tl.program_id(0).to(tl.int64) * per
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    seed = tl.load(seeds)
    for begin in range(0, per, ROWS):
        at = (first + begin) * width + row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows - first - begin) & (column[None, :] < width)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        keeps = kept(seed, first + begin + row, width, level, COLUMNS, tl.program_id(1) * COLUMNS)
        d = tl.where(keeps, d * scale, 0.0)
        tl.store(d_x + at, d, mask=inside)
        if BIAS:
            sums += d
    if BIAS:
        tl.store(
            partial + tl.program_id(0).to(tl.int64) * width + column, tl.sum(sums, 0), mask=column < width
        )
