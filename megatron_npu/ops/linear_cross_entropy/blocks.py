"""Compute the fused loss in blocks of the vocabulary, whose logits the backward pass recomputes to save
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.cross_entropy import reduce_over_ranks
from megatron_npu.ops.exponential import exponential_of_difference_
from megatron_npu.ops.linear_cross_entropy.part import Part
from megatron_npu.ops.products.linear import add_product, product
from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient

# Logits of a block: on a cpu as many as stay in its caches, elsewhere enough to fill the device.
_LOGITS, _LOGITS_ON_CPU = 1 << 24, 1 << 21
# Words less on a cpu: rows of a block that are a power of two apart would share few places of its caches.
_APART = 32
_NARROWEST = 512  # words of a block, however many tokens there are: products of less waste the device


def precise(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums are accumulated, which is fp64 for fp64 tensors and fp32 for all
    others.
    """
    return torch.promote_types(tensor.dtype, torch.float32)


def vocabulary_blocks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield slices of the vocabulary that together cover the rows of ``weight``.

    ``hidden`` is ``[t, h]``.
    """
    on_cpu = hidden.device.type == "cpu"
    width = max(_NARROWEST, (_LOGITS_ON_CPU if on_cpu else _LOGITS) // max(1, hidden.size(0)))
    width -= _APART if on_cpu else 0
    for start in range(0, weight.size(0), width):
        yield slice(start, min(start + width, weight.size(0)))


def part_of(bias: Tensor | None, block: slice) -> Tensor | None:
    """Return the part of the bias that belongs to a block of the vocabulary, or None if there is no bias."""
    return None if bias is None else bias[block]


def columns(local: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return each target's column in a block of the vocabulary, ``[t, 1]``, and a mask of the targets in
    the block.
    """
    inside = (local >= block.start) & (local < block.stop)
    return (local - block.start).masked_fill(~inside, 0)[:, None], inside[:, None]


def predicted_logits(logits: Tensor, local: Tensor, block: slice) -> Tensor:
    """Return the logits ``[t]`` of the targets that are in a block of the vocabulary, and 0 for other
    targets.
    """
    column, inside = columns(local, block)
    return logits.gather(1, column).to(precise(logits)).mul_(inside).squeeze(1)


class LinearCrossEntropy(torch.autograd.Function):
    """Fused output layer and loss that computes the normalizer over all blocks of the vocabulary.

    The backward pass recomputes the probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part
    ) -> Tensor:
        rows, local = hidden.reshape(-1, hidden.size(-1)), target.reshape(-1) - part.start
        normalizer = torch.full(local.shape, -torch.inf, dtype=precise(rows), device=rows.device)
        predicted = torch.zeros_like(normalizer)
        for block in vocabulary_blocks(rows, weight):
            logits = product(rows, weight[block], part_of(bias, block))
            normalizer = torch.logaddexp(normalizer, logits.to(normalizer.dtype).logsumexp(1))
            predicted += predicted_logits(logits, local, block)
        normalizer, predicted = reduce_over_ranks(normalizer, predicted, part.group)
        ctx.save_for_backward(hidden, weight, bias, local, normalizer)
        ctx.main_grad = part.main_grad
        return (normalizer - predicted).resize_(target.shape)  # not a view, which nobody may divide in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, normalizer = ctx.saved_tensors
        rows, factor = hidden.reshape(-1, hidden.size(-1)), grad.reshape(-1, 1).to(normalizer.dtype)
        gradients = Gradients(ctx, rows, weight, bias)
        for block in vocabulary_blocks(rows, weight):
            logits = product(rows, weight[block], part_of(bias, block)).to(normalizer.dtype)
            d_logits = exponential_of_difference_(logits, normalizer[:, None])
            column, inside = columns(local, block)
            d_logits.scatter_add_(1, column, -inside.to(d_logits.dtype)).mul_(factor)
            gradients.add(block, d_logits.to(rows.dtype))
        return *gradients.results(hidden), None, None


class Gradients:
    """Accumulate the gradients of ``rows``, ``weight`` and the bias from the gradients of the logits, block
    by block.

    ``rows`` is ``[t, h]``, ``weight`` is ``[v, h]``.

    Args:
        ctx: the context of an autograd function whose first arguments are hidden states, weight and bias,
            with ``main_grad``.
        factors: ``[t, 1]``, in the dtype of ``rows``: the factor for each row of the logits' gradient, which
            is already applied to ``rows``; None means no factor.
    """

    def __init__(
        self, ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None = None
    ) -> None:
        self.rows, self.weight, self.main_grad = rows, weight, ctx.main_grad
        self.factors = factors
        of_hidden, self.of_weight, of_bias = ctx.needs_input_grad[:3]
        self.d_bias = torch.empty_like(bias) if of_bias and bias is not None else None
        self.d_rows = torch.zeros_like(rows, dtype=precise(rows)) if of_hidden else None
        own = self.of_weight and self.main_grad is None
        self.d_weight = torch.empty_like(weight) if own else None

    def add(self, block: slice, grad: Tensor) -> None:
        """Add the contribution of one block to the gradients, given the gradient of the block's logits."""
        if self.d_rows is not None:
            add_product(self.d_rows, grad, self.weight[block].t())
        if self.d_weight is not None:
            self.d_weight[block] = product(grad.t(), self.rows.t())
        elif self.of_weight:
            accumulate_weight_gradient(self.rows, grad, self.main_grad[block])
        if self.d_bias is None:
            return
        if self.factors is None:
            self.d_bias[block] = grad.sum(0)  # torch adds 16 bits up in fp32
        else:
            self.d_bias[block] = product(grad.t(), self.factors.t()).squeeze(1)

    def results(self, hidden: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of rows, weight and bias, each in the dtype of the tensor it belongs to."""
        if self.d_rows is None:
            return None, self.d_weight, self.d_bias
        return self.d_rows.to(hidden.dtype).view(hidden.shape), self.d_weight, self.d_bias
