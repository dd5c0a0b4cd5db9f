"""Cross entropy from logits: log-softmax and negative log likelihood in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_cross_entropy_loss")
def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss (``[n]``, or ``[1]`` when reduced), log probabilities ``[n, c]`` and two empty tensors.

    A negative ``ignore_index`` ignores nothing, unlike torch's: every target must be a class.
    """
    log_probabilities = torch.log_softmax(input.float(), -1)
    class_weight = torch.ones(input.size(1)) if weight is None else weight
    row_weight = class_weight[target] * _counted(target, ignore_index)
    likelihood = log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
    smooth = (log_probabilities * class_weight).sum(1) / input.size(1) * _counted(target, ignore_index)
    losses = -(1 - label_smoothing) * likelihood * row_weight - label_smoothing * smooth
    if reduction != "none":
        losses = losses.sum().view(1)
    if reduction == "mean":
        losses = losses / row_weight.sum()
    empty = input.new_empty(0)
    return losses.to(input.dtype), log_probabilities.to(input.dtype), empty, empty.clone()


@kernel("npu_cross_entropy_loss_backward")
def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    """Return the gradient of the logits ``[n, c]``; label smoothing is excluded by the limits."""
    row_weight = _counted(target, ignore_index)
    if weight is not None:
        row_weight = row_weight * weight[target]
    scale = row_weight / row_weight.sum() if reduction == "mean" else row_weight
    grad = torch.exp(log_prob.float())
    grad[torch.arange(len(target)), target] -= 1
    return (grad * (grad_loss.float() * scale).unsqueeze(1)).to(grad_loss.dtype)


def _counted(target: Tensor, ignore_index: int) -> Tensor:
    """Return 1 where a target counts and 0 where it is ignored."""
    return (target != ignore_index).float() if ignore_index >= 0 else torch.ones(target.shape)
