"""Compute the loss of older Megatron versions without forming the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_npu.adaptors.shared import gradients
from megatron_npu.ops.linear_cross_entropy import linear_cross_entropy


def loss_of_factors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup,
    into_main_grad: bool,
    recompute: bool,
) -> Tensor:
    """Return the loss ``[b, s]`` in fp32, given hidden states, the output weight and labels.

    Args:
        hidden: ``[s, b, h]``, gathered from all ranks.
        weight: ``[v / tp, h]``.
        labels: ``[b, s]``.
        group: the process group of the tensor-parallel ranks.
        into_main_grad: whether ``--gradient-accumulation-fusion`` is enabled.
        recompute: passed on to the operation.
    """
    main_grad = None
    if into_main_grad and weight.requires_grad and hasattr(weight, "main_grad"):
        main_grad, weight = weight.main_grad, _GradientElsewhere.apply(weight)
    loss = linear_cross_entropy(
        hidden,
        weight,
        labels.t().contiguous(),
        vocab_start=group.rank() * weight.size(0),
        group=group,
        main_grad=main_grad,
        recompute=recompute,
    )
    return loss.t().contiguous()


class _GradientElsewhere(torch.autograd.Function):
    """Autograd function that returns the weight, whose gradient another operation adds to ``main_grad``.

    Upstream's linear layers add their gradients in the same way. megatron-core's data-parallel wrapper still
    waits for a gradient of every parameter, and ignores this gradient if ``grad_added_to_main_grad`` is set.
    With ``zero_out_wgrad``, other gradients are added to it first, so it must be zero. If no part of the
    buffer is sent before the backward pass ends, no gradient is required.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> Tensor | None:
        if gradients.takes_rows(ctx.weight) or not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return None
        ctx.weight.grad_added_to_main_grad = True
        filled = torch.zeros_like if getattr(ctx.weight, "zero_out_wgrad", False) else torch.empty_like
        return filled(ctx.weight)
