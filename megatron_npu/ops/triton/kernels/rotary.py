"""Compute rotary position embedding in one pass.

The backward pass rotates back.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(
    x, cosine, sine, out, second, heads, size, turned,
    x_0, x_1, x_2, c_0, c_1, c_2, s_0, s_1, s_2,
    FORTH: tl.constexpr, INTERLEAVED: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the first ``turned`` values of each head in a tensor ``[first, second, heads, size]``.

    Tables have strides of 0 where one value applies to all. ``REST`` is the rest of a head, rounded up to a
    power of two.
    """
    i = (tl.program_id(0) // second).to(tl.int64)
    j = (tl.program_id(0) % second).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    half = turned // 2
    inside = (head[:, None] < heads) & (pair[None, :] < half)
    if INTERLEAVED:
        a = 2 * pair
        b = a + 1
    else:
        a = pair
        b = pair + half
    x += i * x_0 + j * x_1
    cosine += i * c_0 + j * c_1
    sine += i * s_0 + j * s_1
    out += tl.program_id(0).to(tl.int64) * heads * size
    row = head[:, None] * x_2
    x_a = tl.load(x + row + a[None, :], mask=inside, other=0.0).to(tl.float32)
    x_b = tl.load(x + row + b[None, :], mask=inside, other=0.0).to(tl.float32)
    row = head[:, None] * c_2
    cos_a = tl.load(cosine + row + a[None, :], mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cosine + row + b[None, :], mask=inside, other=0.0).to(tl.float32)
    row = head[:, None] * s_2
    sin_a = tl.load(sine + row + a[None, :], mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sine + row + b[None, :], mask=inside, other=0.0).to(tl.float32)
    if FORTH:
        out_a = x_a * cos_a - x_b * sin_a
        out_b = x_b * cos_b + x_a * sin_b
    else:
        out_a = x_a * cos_a + x_b * sin_b
        out_b = x_b * cos_b - x_a * sin_a
    to = head[:, None] * size
    tl.store(out + to + a[None, :], out_a, mask=inside)
    tl.store(out + to + b[None, :], out_b, mask=inside)
    if REST > 0:
        rest = turned + tl.arange(0, REST)
        inside = (head[:, None] < heads) & (rest[None, :] < size)
        passed = tl.load(x + head[:, None] * x_2 + rest[None, :], mask=inside, other=0.0)
        tl.store(out + to + rest[None, :], passed, mask=inside)
