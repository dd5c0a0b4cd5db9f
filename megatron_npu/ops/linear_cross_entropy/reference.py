"""Compute the fused loss in plain torch from all logits at once, as the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import cross_entropy
from megatron_npu.ops.linear_cross_entropy.part import Part


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, part: Part, recompute: bool
) -> Tensor:
    """Return the loss ``[...]``, computed so that autograd can differentiate it."""
    if part.main_grad is not None:
        weight = _AddTo.apply(weight, part.main_grad)
    logits = F.linear(hidden, weight, bias)
    size = weight.size(0) * (part.group.size() if part.group is not None else 1)
    return cross_entropy.reference(logits, target, part.start, size, part.group, 0.0)


class _AddTo(torch.autograd.Function):
    """Return the weight unchanged, and add its gradient to ``main_grad`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grad)
        return None, None
