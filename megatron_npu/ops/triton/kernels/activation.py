"""Compute GELU (tanh form), SwiGLU and GEGLU of an input plus a bias, with one kernel per direction.

A program processes ``ROWS`` x ``COLUMNS`` values at a time; in backward ``per`` rows, tile by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

K = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
C = tl.constexpr(0.044715)
FAR = tl.constexpr(50.0)  # from where on GELU is the identity or 0 in fp32; the cube of more may overflow


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gelu(z):
    """Return GELU in tanh form: ``z / 2 * (1 + tanh(u))``, which equals ``z * sigmoid(2 * u)``."""
    near = tl.where(z > FAR, FAR, tl.where(z < -FAR, -FAR, z))  # nan stays nan
    return z * sigmoid(2 * K * near * (1 + C * near * near))


@triton.jit
def gelu_slope(z):
    near = tl.where(z > FAR, FAR, tl.where(z < -FAR, -FAR, z))
    s = sigmoid(2 * K * near * (1 + C * near * near))
    return s + near * s * (1 - s) * (2 * K * (1 + 3 * C * near * near))


@triton.jit
def curve(z, SILU: tl.constexpr):
    if SILU:
        return z * sigmoid(z)
    else:
        return gelu(z)


@triton.jit
def curve_slope(z, SILU: tl.constexpr):
    if SILU:
        s = sigmoid(z)
        return s * (1 + z * (1 - s))
    else:
        return gelu_slope(z)


@triton.jit
def bias_gelu(x, bias, out, rows, width, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute GELU of ``[rows, width]`` plus the bias ``[width]``."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    tile = row[:, None] * width + column[None, :]
    inside = (row[:, None] < rows - first) & (column[None, :] < width)
    z = tl.load(x + first * width + tile, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + first * width + tile, gelu(z), mask=inside)


@triton.jit
def bias_gelu_backward(
    grad, x, bias, d_x, partial, rows, width, per,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``x`` and, if there is a bias, partial sums ``[chunks, width]`` of that
    gradient.
    """
    first = tl.program_id(0).to(tl.int64) * per
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    tile = row[:, None] * width + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    shift = tl.zeros([COLUMNS], tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    for begin in range(0, per, ROWS):
        inside = (row[:, None] < rows - first - begin) & (column[None, :] < width)
        at = (first + begin) * width + tile
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * gelu_slope(z)
        tl.store(d_x + at, d, mask=inside)
        if BIAS:
            sums += d
    if BIAS:
        tl.store(
            partial + tl.program_id(0).to(tl.int64) * width + column, tl.sum(sums, 0), mask=column < width
        )


@triton.jit
def gated(
    x, bias, out, rows, half,
    SILU: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ``curve(a) * b``, ``[rows, half]``, from a tensor ``[rows, 2 half]`` whose halves are a and
    b.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (row[:, None] < rows - first) & (column[None, :] < half)
    at = x + first * (2 * half) + row[:, None] * (2 * half) + column[None, :]
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
        b += tl.load(bias + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    to = out + first * half + row[:, None] * half + column[None, :]
    tl.store(to, curve(a, SILU) * b, mask=inside)


@triton.jit
def gated_backward(
    grad, x, bias, d_x, partial, rows, half, per,
    SILU: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``x`` and, if there is a bias, partial sums ``[chunks, 2 half]`` of that
    gradient.
    """
    first = tl.program_id(0).to(tl.int64) * per
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    sums_a = tl.zeros([ROWS, COLUMNS], tl.float32)
    sums_b = tl.zeros([ROWS, COLUMNS], tl.float32)
    shift_a = tl.zeros([COLUMNS], tl.float32)
    shift_b = tl.zeros([COLUMNS], tl.float32)
    if BIAS:
        shift_a = tl.load(bias + column, mask=column < half, other=0.0).to(tl.float32)
        shift_b = tl.load(bias + half + column, mask=column < half, other=0.0).to(tl.float32)
    for begin in range(0, per, ROWS):
        inside = (row[:, None] < rows - first - begin) & (column[None, :] < half)
        at = (first + begin) * (2 * half) + row[:, None] * (2 * half) + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift_a[None, :]
        b = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32) + shift_b[None, :]
        from_ = grad + (first + begin) * half + row[:, None] * half + column[None, :]
        d = tl.load(from_, mask=inside, other=0.0).to(tl.float32)
        d_a = d * b * curve_slope(a, SILU)
        d_b = d * curve(a, SILU)
        tl.store(d_x + at, d_a, mask=inside)
        tl.store(d_x + at + half, d_b, mask=inside)
        if BIAS:
            sums_a += d_a
            sums_b += d_b
    if BIAS:
        to = partial + tl.program_id(0).to(tl.int64) * (2 * half) + column
        tl.store(to, tl.sum(sums_a, 0), mask=column < half)
        tl.store(to + half, tl.sum(sums_b, 0), mask=column < half)
