"""Define reference kernels for cross-entropy from logits, or from hidden states and output weights."""

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
    """Return the loss (``[n]``, or ``[1]`` if reduced), the log-probabilities ``[n, c]`` and two empty
    tensors.

    Unlike in torch, a negative ``ignore_index`` ignores nothing: every target must be a class.
    """
    log_probabilities = torch.log_softmax(input.float(), -1)
    class_weight = torch.ones(input.size(1), dtype=torch.float32) if weight is None else weight
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
    """Return the gradient of the logits ``[n, c]``. The limits do not allow label smoothing."""
    row_weight = _counted(target, ignore_index)
    if weight is not None:
        row_weight = row_weight * weight[target]
    scale = row_weight / row_weight.sum() if reduction == "mean" else row_weight
    grad = torch.exp(log_prob.float())
    grad[torch.arange(len(target)), target] -= 1
    return (grad * (grad_loss.float() * scale).unsqueeze(1)).to(grad_loss.dtype)


def _counted(target: Tensor, ignore_index: int) -> Tensor:
    """Return 1 for each target that counts, and 0 for each target that is ignored."""
    if ignore_index < 0:
        return torch.ones(target.shape, dtype=torch.float32)
    return (target != ignore_index).float()


@kernel("npu_fused_linear_online_max_sum")
def npu_fused_linear_online_max_sum(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the row statistics for this part of the vocabulary that are needed to compute the loss.

    The statistics are each row's largest logit; its sum of exponentials and its target's logit, both relative
    to the largest; a packed bit for each target outside the part (the first in the lowest bit; the last byte
    is filled with ones); the target's index in the part, or 0; and the logits ``[n, v]`` if requested.
    """
    logits = input.float() @ weight.float().t()
    largest = logits.amax(1)
    relative = logits - largest[:, None]
    elsewhere = (target < vocab_start_index) | (target > vocab_end_index)
    index = (target - vocab_start_index).masked_fill(elsewhere, 0)
    predicted = relative.gather(1, index[:, None].long()).squeeze(1).masked_fill(elsewhere, 0.0)
    kept = logits.to(input.dtype) if return_logits else input.new_empty(0)
    return largest, relative.exp().sum(1), predicted, _packed(elsewhere), index, kept


@kernel("npu_fused_cross_entropy_loss_with_max_sum")
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max: Tensor,
    sum_exp_logits: Tensor,
    predicted_logits: Tensor,
    *,
    label_smoothing: float | None = 0.0,
    input: Tensor | None = None,
    weight: Tensor | None = None,
    vocab_parallel_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss ``[n]`` and, if logits are given, the probabilities ``[n, v]``."""
    loss = sum_exp_logits.log() - predicted_logits
    if vocab_parallel_logits is None:
        return loss, loss.new_empty(0)
    exponentials = (vocab_parallel_logits.float() - logits_max[:, None]).exp()
    return loss, exponentials / sum_exp_logits[:, None]


@kernel("npu_fused_linear_cross_entropy_loss_with_max_sum_backward")
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    target_mask: Tensor,
    masked_target: Tensor,
    label_smoothing: float = 0.0,
    logits_max: Tensor | None = None,
    sum_exp_logits: Tensor | None = None,
    softmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``input`` and ``weight`` in the fused linear cross-entropy loss.

    The logits' gradient is rounded to their dtype.
    """
    if softmax is None:
        logits = input.float() @ weight.float().t()
        softmax = (logits - logits_max[:, None]).exp() / sum_exp_logits[:, None]  # type: ignore[index]
    here = (~_unpacked(target_mask, len(masked_target))).to(softmax.dtype)
    of_logits = softmax.scatter_add(1, masked_target[:, None].long(), -here[:, None]) * grad[:, None]
    rounded = of_logits.to(input.dtype).float()
    return (rounded @ weight.float()).to(input.dtype), (rounded.t() @ input.float()).to(weight.dtype)


_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


def _packed(mask: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % 8), value=True)
    return (padded.view(-1, 8) * _BITS).sum(1, dtype=torch.uint8)


def _unpacked(mask: Tensor, count: int) -> Tensor:
    return (mask[:, None] & _BITS).bool().view(-1)[:count]
