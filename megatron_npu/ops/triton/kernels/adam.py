"""Compute an Adam step for many tensors in one kernel launch, which also writes 16-bit copies of the
weights.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at(table, owner, column, begin, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element ``begin`` of an array whose address is stored in the table.

    ``begin`` is a multiple of the block size.
    """
    pointer = tl.load(table + owner * 5 + column).to(tl.pointer_type(KIND)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def update(
    weights, grads, firsts, seconds, copies, left,
    factor, decay, l2, keep1, new1, keep2, new2, size_of_step, root, eps,
    NARROW: tl.constexpr, PARTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of values, given the pointers to them.

    With ``PARTIAL``, only its first ``left`` values exist.
    """
    index = tl.arange(0, BLOCK)
    if PARTIAL:
        inside = index < left
    else:
        inside = tl.full([BLOCK], True, tl.int1)
    g = tl.load(grads + index, mask=inside, other=0.0)
    w = tl.load(weights + index, mask=inside, other=0.0)
    m = tl.load(firsts + index, mask=inside, other=0.0)
    v = tl.load(seconds + index, mask=inside, other=0.0)
    g *= factor
    g += l2 * w
    w *= decay
    m = keep1 * m + new1 * g
    v = keep2 * v + new2 * g * g
    w -= size_of_step * m / (tl.sqrt(v) * root + eps)
    tl.store(weights + index, w, mask=inside)
    tl.store(firsts + index, m, mask=inside)
    tl.store(seconds + index, v, mask=inside)
    if NARROW != 0:
        tl.store(copies + index, w.to(copies.dtype.element_ty), mask=inside)


@triton.jit
def step(
    table, sizes, firsts, owners, factor, decay, l2, keep1, new1, keep2, new2, size_of_step, root, eps,
    NARROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of a tensor: weights, gradients and both moments in fp32, and the 16-bit copy of the
    weights.

    Args:
        table: int64 ``[tensors, 5]``, the addresses of these five.
        sizes, firsts: for each tensor, its number of values and the index of its first block.
        owners: int32, for each block the index of its tensor.
        factor: the factor of the gradients.
        decay, l2: AdamW's weight decay, as a factor of the weights, and Adam's, which is added to the
            gradient.
        NARROW: 0 without copies, 1 for bf16, 2 for fp16.
    """
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    begin = (block - tl.load(firsts + owner)).to(tl.int64) * BLOCK
    left = tl.load(sizes + owner) - begin
    weights = at(table, owner, 0, begin, tl.float32, ALIGNED)
    grads = at(table, owner, 1, begin, tl.float32, ALIGNED)
    first = at(table, owner, 2, begin, tl.float32, ALIGNED)
    second = at(table, owner, 3, begin, tl.float32, ALIGNED)
    copies = weights
    if NARROW == 1:
        copies = at(table, owner, 4, begin, tl.bfloat16, ALIGNED)
    elif NARROW == 2:
        copies = at(table, owner, 4, begin, tl.float16, ALIGNED)
    if left >= BLOCK:
        update(
            weights, grads, first, second, copies, left,
            factor, decay, l2, keep1, new1, keep2, new2, size_of_step, root, eps, NARROW, False, BLOCK,
        )  # fmt: skip
    else:
        update(
            weights, grads, first, second, copies, left,
            factor, decay, l2, keep1, new1, keep2, new2, size_of_step, root, eps, NARROW, True, BLOCK,
        )  # fmt: skip
