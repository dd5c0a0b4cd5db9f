"""Compute layer norm and RMS norm, optionally after adding a residual, with one program per row.

``LAYER`` selects a layer norm with mean and bias; otherwise, it is an RMS norm. With ``ADD``, the input of
the norm is ``residual + dropout(x + shift)``, which is written too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_npu.ops.triton.kernels.dropout import kept


@triton.jit
def forward(
    x, shift, residual, total, seeds, weight, bias, out, means, rstds, rows, width, eps, level, scale,
    LAYER: tl.constexpr, CENTERED: tl.constexpr, ADD: tl.constexpr, SHIFT: tl.constexpr,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the norm of ``[rows, width]``, and fp32 ``[rows]`` means (layer norm only) and inverse
    deviations.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row[:, None] < rows - first) & (column[None, :] < width)
    at = first * width + row[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        if SHIFT:
            value += tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if DROP:
            keeps = kept(tl.load(seeds), first + row, width, level, COLUMNS, 0)
            value = tl.where(keeps, value * scale, 0.0)
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value, 0.0)
        rounded = value.to(total.dtype.element_ty)  # what backward will read
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if LAYER:
        mean = tl.sum(value, 1) / width
        value = tl.where(inside, value - mean[:, None], 0.0)
        tl.store(means + first + row, mean, mask=row < rows - first)
    rstd = 1 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(rstds + first + row, rstd, mask=row < rows - first)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1
    result = value * rstd[:, None] * factor[None, :]
    if LAYER:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, result, mask=inside)


@triton.jit
def backward(
    grad, of_total, x, weight, means, rstds, d_x, d_added, seeds, partial, rows, width, per, level, scale,
    LAYER: tl.constexpr, CENTERED: tl.constexpr, TOTAL: tl.constexpr, SHIFT: tl.constexpr,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the norm's input, with ``of_total`` added if it is given.

    Each program handles ``per`` rows.

    Partial sums go to ``partial`` ``[chunks, k, width]``: those of the weight, of the bias for a layer norm,
    and of the ``SHIFT`` if there was one. ``d_added`` is the gradient of the dropout's input.
    """
    first = tl.program_id(0).to(tl.int64) * per
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1
    of_weight = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_shift = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, per, ROWS):
        there = row < rows - first - begin
        inside = there[:, None] & (column[None, :] < width)
        at = (first + begin) * width + row[:, None] * width + column[None, :]
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + first + begin + row, mask=there, other=0.0)
        if LAYER:
            normal -= tl.load(means + first + begin + row, mask=there, other=0.0)[:, None]
        normal = tl.where(inside, normal * rstd[:, None], 0.0)
        of_weight += dy * normal
        scaled = dy * factor[None, :]
        d = scaled - normal * (tl.sum(scaled * normal, 1) / width)[:, None]
        if LAYER:
            of_bias += dy
            d -= (tl.sum(scaled, 1) / width)[:, None]
        d *= rstd[:, None]
        if TOTAL:
            d += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + at, d, mask=inside)
        if DROP:
            keeps = kept(tl.load(seeds), first + begin + row, width, level, COLUMNS, 0)
            d = tl.where(keeps, d * scale, 0.0)
            tl.store(d_added + at, d, mask=inside)
        if SHIFT:
            of_shift += tl.where(inside, d, 0.0)
    sums: tl.constexpr = 1 + LAYER + SHIFT
    to = partial + tl.program_id(0).to(tl.int64) * (sums * width) + column
    tl.store(to, tl.sum(of_weight, 0), mask=column < width)
    if LAYER:
        tl.store(to + width, tl.sum(of_bias, 0), mask=column < width)
    if SHIFT:
        tl.store(to + (sums - 1) * width, tl.sum(of_shift, 0), mask=column < width)
