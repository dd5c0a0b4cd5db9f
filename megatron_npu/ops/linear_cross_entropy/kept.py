"""Exponentials instead of logits: kept from forward to backward, which is two products for each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.cross_entropy import reduce_over_ranks
from megatron_npu.ops.exponential import exponential_
from megatron_npu.ops.linear import product
from megatron_npu.ops.linear_cross_entropy.blocks import (
    Gradients,
    precise,
    predicted_logits,
    vocabulary_blocks,
)
from megatron_npu.ops.linear_cross_entropy.part import Part

# Exponentials are taken of logits minus the largest of the first block, before the others are known. If the
# whole sum is further than that from it (e⁴⁰; bf16 and fp32 reach e⁸⁸), they are taken again.
_FAR = 40.0


class LinearCrossEntropy(torch.autograd.Function):
    """Forward keeps ``e = exp(z - r)``; with the normalizer n the probabilities are ``e · exp(r - n)``.

    That factor belongs to a row, so backward puts it into the rows of the factors and results of its products
    and has nothing to do for each logit. At the targets ``e - exp(n - r)`` stands in place of e.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, part: Part) -> Tensor:
        rows, local = hidden.reshape(-1, hidden.size(-1)), target.reshape(-1) - part.start
        kept = _Exponentials(rows, weight, local)
        normalizer, predicted = reduce_over_ranks(kept.normalizer(), kept.predicted, part.group)
        if kept.is_far_from(normalizer):  # another rank has much larger logits
            kept.fill(normalizer)
        kept.subtract_targets(normalizer)
        ctx.save_for_backward(hidden, weight, (kept.reference - normalizer).exp_(), *kept.blocks)
        ctx.main_grad = part.main_grad
        return (normalizer - predicted).resize_(target.shape)  # not a view, which nobody may divide in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale, *blocks = ctx.saved_tensors
        factor = (grad.reshape(-1).to(scale.dtype) * scale)[:, None]
        rows = hidden.reshape(-1, hidden.size(-1))
        gradients = Gradients(ctx, (rows * factor).to(rows.dtype), weight)
        for block, exponentials in zip(vocabulary_blocks(rows, weight), blocks, strict=True):
            gradients.add(block, exponentials)
        if gradients.d_rows is not None:
            gradients.d_rows *= factor
        return *gradients.results(hidden), None, None


class _Exponentials:
    """The exponentials of the logits by blocks of their columns, the sums, and the logits of the targets."""

    def __init__(self, rows: Tensor, weight: Tensor, local: Tensor) -> None:
        self.rows, self.weight, self.local = rows, weight, local
        first = next(vocabulary_blocks(rows, weight))
        self.fill(product(rows, weight[first]).amax(1).to(precise(rows)))
        if self.is_far_from(self.normalizer()):
            self.fill(self._largest())

    def fill(self, reference: Tensor) -> None:
        """Take ``exp(z - reference)`` of every block."""
        self.reference, self.blocks = reference, []
        self.sums, self.predicted = torch.zeros_like(reference), torch.zeros_like(reference)
        for block in vocabulary_blocks(self.rows, self.weight):
            logits = product(self.rows, self.weight[block])
            self.predicted += predicted_logits(logits, self.local, block)
            exact = exponential_(logits.to(reference.dtype).sub_(reference[:, None]))  # in place in fp32
            self.sums += exact.sum(1)
            self.blocks.append(exact if exact is logits else logits.copy_(exact))

    def normalizer(self) -> Tensor:
        """Return the logarithm of the sum of ``exp(z)``, ``[t]``."""
        return self.reference + self.sums.log()

    def is_far_from(self, normalizer: Tensor) -> bool:
        """Return whether a row's sum left the range of the exponentials, or will at its target."""
        return not bool(((normalizer - self.reference) < _FAR).all())

    def _largest(self) -> Tensor:
        maxima = [
            product(self.rows, self.weight[block]).amax(1)
            for block in vocabulary_blocks(self.rows, self.weight)
        ]
        return torch.stack(maxima).amax(0).to(self.reference.dtype)

    def subtract_targets(self, normalizer: Tensor) -> None:
        """Put ``e - exp(normalizer - reference)`` where the targets are: the gradient of the logit there."""
        at_target = (self.predicted - self.reference).exp_() - (normalizer - self.reference).exp_()
        for block, part in zip(vocabulary_blocks(self.rows, self.weight), self.blocks, strict=True):
            hits = ((self.local >= block.start) & (self.local < block.stop)).nonzero().squeeze(1)
            part[hits, self.local[hits] - block.start] = at_target[hits].to(part.dtype)
