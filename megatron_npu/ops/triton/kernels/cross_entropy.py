"""Compute the cross-entropy of rows of logits, with one kernel per direction.

A program handles a row or a part of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    logits, targets, normalizers, predicted, totals, losses, stride, words, start, ignored, share, size,
    WHOLE: tl.constexpr, SMOOTH: tl.constexpr, IGNORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp of each row, computed in one pass with a running maximum.

    Also write the loss if the row has the ``WHOLE`` vocabulary; otherwise, write the target's logit, or 0 if
    another rank has it, and with ``SMOOTH`` the sum of all logits. If targets may be ``ignored``, a target
    that matches no column results in nan.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    wanted = words
    if IGNORES:
        wanted = tl.where(target == ignored, 0, words)
    column = tl.arange(0, BLOCK)
    largest = tl.full([], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, wanted, BLOCK):
        inside = begin + column < words
        z = tl.load(logits + begin + column, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(z, 0))
        reference = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(largest - reference) + tl.exp(z - reference)
        largest = new
        if SMOOTH:
            total += tl.where(inside, z, 0.0)
    whole_sum = tl.sum(sums, 0)
    if IGNORES:
        whole_sum = tl.where(target == ignored, 1.0, whole_sum)
    normalizer = largest + tl.log(whole_sum)
    local = target - start
    here = (local >= 0) & (local < words)
    at_target = tl.load(logits + local, mask=here, other=0.0).to(tl.float32)
    tl.store(normalizers + row, normalizer)
    if WHOLE:
        if IGNORES:
            at_target = tl.where(here, at_target, float("nan"))
        loss = normalizer - at_target
        if SMOOTH:
            loss = (1 - share) * loss + share * (normalizer - tl.sum(total, 0) / size)
        if IGNORES:
            loss = tl.where(target == ignored, 0.0, loss)
        tl.store(losses + row, loss)
    else:
        tl.store(predicted + row, at_target)
        if SMOOTH:
            tl.store(totals + row, tl.sum(total, 0))


@triton.jit
def backward(
    grads, logits, targets, normalizers, out, stride, out_stride, words, start, ignored, share, size,
    SMOOTH: tl.constexpr, IGNORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``BLOCK`` logits of one row to ``out``.

    ``out`` may be the logits tensor itself.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    target = tl.load(targets + row)
    factor = tl.load(grads + row).to(tl.float32)
    normalizer = tl.load(normalizers + row)
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.exp(z - normalizer)
    hit = factor
    if SMOOTH:
        d -= share / size
        hit *= 1 - share
    d *= factor
    d = tl.where(column == target - start, d - hit, d)
    if IGNORES:
        d = tl.where(target == ignored, 0.0, d)
    tl.store(out + row * out_stride + column, d, mask=inside)
