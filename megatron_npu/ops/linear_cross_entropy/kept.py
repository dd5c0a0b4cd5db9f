"""Save exponentials of the logits for the backward pass, which then needs only two matmuls per block of
the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import compiled
from megatron_npu.ops.compiled import products
from megatron_npu.ops.cross_entropy import reduce_over_ranks
from megatron_npu.ops.exponential import exponential_of_difference_
from megatron_npu.ops.linear_cross_entropy.blocks import (
    Gradients,
    part_of,
    precise,
    vocabulary_blocks,
)
from megatron_npu.ops.linear_cross_entropy.part import Part
from megatron_npu.ops.products.linear import product

# Exponentials are taken of logits minus the largest of the first words, before the others are known. If the
# whole sum is further than that from it (e⁴⁰; bf16 and fp32 reach e⁸⁸), they are taken again.
_FAR = 40.0
_FIRST = 1024


class LinearCrossEntropy(torch.autograd.Function):
    """Fused output layer and loss whose forward pass saves exponentials of the logits, ``e = exp(z - r)``.

    The probabilities are ``e · exp(r - n)``.

    n is the normalizer. The factor is the same for a whole row, so backward applies it to the rows of the
    operands and results of its matmuls instead of to each logit. At the targets, ``e - exp(n - r)`` is stored
    instead of e.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part
    ) -> Tensor:
        rows, local = hidden.reshape(-1, hidden.size(-1)), target.reshape(-1) - part.start
        kept = _Exponentials(rows, weight, bias, local)
        normalizer, predicted = reduce_over_ranks(kept.normalizer(), kept.predicted, part.group)
        if kept.is_far_from(normalizer):  # another rank has much larger logits
            kept.fill(normalizer)
        kept.subtract_targets(normalizer)
        scale = (kept.reference - normalizer).exp_()
        ctx.save_for_backward(hidden, weight, bias, scale, *kept.blocks)
        ctx.main_grad = part.main_grad
        return (normalizer - predicted).resize_(target.shape)  # not a view, which nobody may divide in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, scale, *blocks = ctx.saved_tensors
        factor = (grad.reshape(-1).to(scale.dtype) * scale)[:, None]
        rows = hidden.reshape(-1, hidden.size(-1))
        gradients = Gradients(ctx, (rows * factor).to(rows.dtype), weight, bias, factor.to(rows.dtype))
        for block, exponentials in zip(vocabulary_blocks(rows, weight), blocks, strict=True):
            gradients.add(block, exponentials)
        if gradients.d_rows is not None:
            gradients.d_rows *= factor
        return *gradients.results(hidden), None, None


class _Exponentials:
    """The exponentials of the logits in blocks of columns, with their row sums and the logits of the
    targets.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, local: Tensor) -> None:
        self.rows, self.weight, self.bias, self.local = rows, weight, bias, local
        self.targets = _targets_by_block(local, [*vocabulary_blocks(rows, weight)])
        first = slice(0, min(_FIRST, weight.size(0)))
        self.fill(self._logits(first).amax(1).to(precise(rows)))
        if self.is_far_from(self.normalizer()):
            self.fill(self._largest())

    def fill(self, reference: Tensor) -> None:
        """Compute ``exp(z - reference)`` of the logits z, block by block."""
        self.reference, self.blocks = reference, list[Tensor]()
        self.sums, self.predicted = torch.zeros_like(reference), torch.zeros_like(reference)
        if products.has_exponentials(self.rows, self.weight.t()):
            self._fill_by_products()
        else:
            self._fill_from_logits()

    def _fill_by_products(self) -> None:
        """Compute the matmuls and the exponentials in a single call, without rounding the logits or
        writing them to memory.
        """
        for block in vocabulary_blocks(self.rows, self.weight):
            words, bias = self.weight[block].t(), part_of(self.bias, block)
            self.blocks.append(products.exponentials(self.rows, words, bias, self.reference, self.sums))
        inside = (self.local >= 0) & (self.local < self.weight.size(0))
        word = self.local.masked_fill(~inside, 0)
        logits = (self.rows.to(torch.float32) * self.weight[word]).sum(1)
        if self.bias is not None:
            logits += self.bias[word]
        self.predicted = logits.mul_(inside)

    def _fill_from_logits(self) -> None:
        reference = self.reference
        shared = reference.new_empty(0)  # of all blocks, where logits are 16 bits and have no kernel of ours
        for block, (tokens, columns) in zip(
            vocabulary_blocks(self.rows, self.weight), self.targets, strict=True
        ):
            logits = self._logits(block)
            if tokens.numel():
                self.predicted[tokens] = logits[tokens, columns].to(reference.dtype)
            self.blocks.append(logits)
            if compiled.usable(logits):
                compiled.exponentials_(logits, reference, self.sums)
                continue
            exact = logits
            if logits.dtype is not reference.dtype:
                shared = shared if shared.numel() else torch.empty_like(logits, dtype=reference.dtype)
                exact = shared.view(-1)[: logits.numel()].view(logits.shape).copy_(logits)
            exponential_of_difference_(exact, reference[:, None])
            self.sums += exact.sum(1)
            if exact is not logits:
                logits.copy_(exact)

    def _logits(self, block: slice) -> Tensor:
        return product(self.rows, self.weight[block], part_of(self.bias, block))

    def normalizer(self) -> Tensor:
        """Return the logarithm of the sum of ``exp(z)`` over each row of the logits z, ``[t]``."""
        return self.reference + self.sums.log()

    def is_far_from(self, normalizer: Tensor) -> bool:
        """Return True if a row's sum, or later the value at its target, is outside the representable range.

        The range is that of the exponentials.
        """
        return not bool(((normalizer - self.reference) < _FAR).all())

    def _largest(self) -> Tensor:
        maxima = [self._logits(block).amax(1) for block in vocabulary_blocks(self.rows, self.weight)]
        return torch.stack(maxima).amax(0).to(self.reference.dtype)

    def subtract_targets(self, normalizer: Tensor) -> None:
        """Subtract ``exp(normalizer - reference)`` from the exponential at each target.

        This turns the exponentials there into the logits' gradient.
        """
        at_target = (self.predicted - self.reference).exp_() - (normalizer - self.reference).exp_()
        for (tokens, columns), part in zip(self.targets, self.blocks, strict=True):
            if tokens.numel():
                part[tokens, columns] = at_target[tokens].to(part.dtype)


def _targets_by_block(local: Tensor, blocks: list[slice]) -> list[tuple[Tensor, Tensor]]:
    """Return, for each block of the vocabulary, the tokens whose targets are in it and the columns of these
    targets.

    Args:
        local: ``[t]``, the targets, some of which are in no block.
        blocks: the blocks in order, without gaps.
    """
    in_order, tokens = local.sort()
    bounds = torch.tensor([*(block.start for block in blocks), blocks[-1].stop], device=local.device)
    cuts = torch.searchsorted(in_order, bounds).tolist()
    return [
        (tokens[begin:end], in_order[begin:end] - block.start)
        for block, begin, end in zip(blocks, cuts, cuts[1:], strict=False)
    ]
