"""How far attention in fp32 or bf16 may be from fp64: each rounding of its arithmetic, to first order.

A rounding errs by no more than half a unit in the last place, in either direction, so the errors of a sum are
added as squares. A bound therefore grows with the root of how many roundings are summed, for every shape: the
gradient of a key has one from each query that sees it. A weight that is near 1 errs less, since 1 is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SUM = UNIT[torch.float32] ** 2  # square of the error of a sum, of the square of each term: sums are fp32
LENGTHS = 6  # within which all errors are: of some 10⁸ values that were tried, the furthest was at 4.4


class Values(NamedTuple):
    """Output and gradients, or what each may be off by."""

    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Rounded:
    """One call without dropout, and how far roundings carry each of its results.

    Attributes:
        query: ``[b, n, sq, d]``, as is ``grad`` but for its width, which is that of values.
        key: ``[b, g, sk, d]``, as is ``value``.
        value: see ``key``.
        grad: see ``query``.
        scale: of scores.
        pairs: ``[…, sq, sk]``, which keys a query sees.
        dtype: of factors, weights, gradients of scores and results.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    scale: float
    pairs: Tensor
    dtype: torch.dtype

    def bounds(self) -> Values:
        repeats = self.query.size(1) // self.key.size(1)
        key, value = (t.repeat_interleave(repeats, 1) for t in (self.key, self.value))
        queries, keys = repeats * self.query.size(2), key.size(2)
        unit, factor = UNIT[self.dtype] ** 2, self.scale**2
        scores = (self.query @ key.mT * self.scale).masked_fill(~self.pairs, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # of none that is seen, zeros
        d_weights = self.grad @ value.mT
        output = weights @ value
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))

        relative = self._of_scores(scores, key)  # squares from here on
        largest = weights.amax(-1, keepdim=True)
        forward = self._of_weights(weights, largest - weights) + weights.square() * (relative + keys * SUM)
        backward = self._of_weights(weights, 1 - weights) + weights.square() * (relative + queries * SUM)
        # what backward subtracts from a row is the product of the gradient and of the output that was rounded
        subtrahend = (forward * d_weights.square()).sum(-1, keepdim=True) + (
            (unit + value.size(-1) * SUM) * (self.grad * output).square().sum(-1, keepdim=True)
        )
        of_products = value.size(-1) * SUM * (self.grad.square() @ value.square().mT)
        own = (unit + relative) * d_scores.square() + weights.square() * of_products
        along_keys = own + keys * SUM * d_scores.square()
        along_queries = own + queries * SUM * d_scores.square() + weights.square() * subtrahend
        squares = (
            forward @ value.square() + unit * output.square(),
            factor * (along_keys @ key.square() + (weights @ key).square() * subtrahend)
            + unit * factor * (d_scores @ key).square(),
            factor * _of_groups(along_queries.mT @ self.query.square(), repeats)
            + unit * factor * _of_groups(d_scores.mT @ self.query, repeats).square(),
            _of_groups(backward.mT @ self.grad.square(), repeats)
            + unit * _of_groups(weights.mT @ self.grad, repeats).square(),
        )
        return Values(*(LENGTHS * each.sqrt() for each in squares))

    def _of_scores(self, scores: Tensor, key: Tensor) -> Tensor:
        """Return the square of a weight's error before it is rounded, relative to the weight."""
        products = self.scale**2 * self.query.size(-1) * (self.query.square() @ key.square().mT)
        scores = scores.where(self.pairs, 0.0)
        largest = scores.abs().amax(-1, keepdim=True)  # is subtracted
        return SUM * (products + scores.square() + largest.square() + 4)  # and of the exponential

    def _of_weights(self, weights: Tensor, from_exact: Tensor) -> Tensor:
        return torch.minimum(UNIT[self.dtype] * weights, from_exact).square()


def _of_groups(of_heads: Tensor, repeats: int) -> Tensor:
    """Add up what the queries of a group give to the key that they share."""
    return of_heads.unflatten(1, (-1, repeats)).sum(2)


def compare(call: Callable[..., Tensor], leaves: Sequence[Tensor], scale: float, pairs: Tensor) -> None:
    """Compare a call's output, and the gradients of a random one, with the same call's in fp64.

    Args:
        call: takes query, key and value, ``[b, n, s, d]``.
        leaves: these in fp32 or bf16, with gradients.
        scale: of scores.
        pairs: ``[…, sq, sk]``, which keys a query sees.
    """
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output, exact = call(*leaves), call(*doubles)
    grad = torch.randn_like(exact).to(output.dtype)
    ours = Values(output, *torch.autograd.grad(output, leaves, grad))
    expected = Values(exact, *torch.autograd.grad(exact, doubles, grad.double()))
    values = [each.detach().float() for each in (*leaves, grad)]
    _assert_within(ours, expected, Rounded(*values, scale, pairs, output.dtype).bounds())


def _assert_within(actual: Values, exact: Values, bounds: Values) -> None:
    """Compare value by value; values below 1e-12 are none."""
    for name, value, expected, bound in zip(Values._fields, actual, exact, bounds, strict=True):
        beyond = ((value.detach().double() - expected).abs() / (bound + 1e-12)).max().item()
        assert beyond <= 1, f"{name}: {beyond:.3g} times as far from fp64 as roundings explain"
