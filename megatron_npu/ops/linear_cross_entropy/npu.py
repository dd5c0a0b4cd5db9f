"""Compute the fused loss with the kernels of torch_npu 2.13, which save no logits (Atlas A2 and later)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.linear_cross_entropy.part import Part

_HALVES = (torch.bfloat16, torch.float16)
_FEWEST_WORDS, _MOST_HIDDEN = 128, 65534  # the limits of the backward, and of aclnnFusedLinearOnlineMaxSum
_NAME = "npu_fused_linear_online_max_sum"


def beyond_kernels(hidden: Tensor, weight: Tensor) -> str | None:
    """Return the documented limit of torch_npu's loss kernels that the tensors exceed, or None."""
    import torch_npu

    if not hasattr(torch_npu, _NAME) or not torch_npu.npu.utils.is_support_inf_nan():
        return f"{_NAME} requires Ascend 910B or later, and torch_npu 2.13"
    if hidden.dtype not in _HALVES or weight.dtype is not hidden.dtype:
        return f"{_NAME} does not support {hidden.dtype} with {weight.dtype}"
    if weight.size(0) < _FEWEST_WORDS or weight.size(1) > _MOST_HIDDEN:
        return (
            f"{_NAME} supports only vocabularies of at least {_FEWEST_WORDS} tokens and hidden sizes of "
            f"at most {_MOST_HIDDEN}"
        )
    return None if hidden.numel() else f"{_NAME} requires at least one row"


class LinearCrossEntropy(torch.autograd.Function):
    """Fused output layer and loss computed by three kernels: row statistics, the loss, and both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, part: Part) -> Tensor:
        import torch_npu

        rows, ids = hidden.reshape(-1, hidden.size(-1)), _ids(target, part.start, weight.size(0))
        largest, sums, predicted, mask, masked, *_ = torch_npu.npu_fused_linear_online_max_sum(
            rows, weight, ids, 0, weight.size(0)
        )
        largest, sums, predicted = _over_ranks(largest, sums, predicted, ids >= 0, part.group)
        loss, *_ = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(largest, sums, predicted)
        ctx.save_for_backward(hidden, weight, mask, masked, largest, sums)
        ctx.main_grad = part.main_grad
        return loss.resize_(target.shape)  # not a view, which nobody may divide in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        import torch_npu

        hidden, weight, mask, masked, largest, sums = ctx.saved_tensors
        rows, grad = hidden.reshape(-1, hidden.size(-1)), grad.reshape(-1).float()
        d_rows, d_weight = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad, rows, weight, mask, masked, 0.0, largest, sums
        )
        if ctx.main_grad is not None and ctx.needs_input_grad[1]:
            ctx.main_grad.add_(d_weight)
            d_weight = None
        return d_rows.view(hidden.shape), d_weight, None, None


def _ids(target: Tensor, vocab_start: int, words: int) -> Tensor:
    """Return the target ids ``[t]`` relative to this rank's part of the vocabulary.

    Ids of other ranks become -1.

    With these ids the kernel's first index is 0 and its last index may be ``words``: the documentation treats
    the last index as part of the range, and the public tests treat it as the first index outside the range.
    """
    local = target.reshape(-1) - vocab_start
    return local.masked_fill((local < 0) | (local >= words), -1)


def _over_ranks(
    largest: Tensor, sums: Tensor, predicted: Tensor, inside: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the row statistics of all ranks, each of which is relative to that rank's largest logit."""
    if group is None or group.size() == 1:
        return largest, sums, predicted
    over_all = largest.clone()
    dist.all_reduce(over_all, op=dist.ReduceOp.MAX, group=group)
    shift = largest - over_all
    totals = torch.stack([sums * shift.exp(), (predicted + shift) * inside])
    dist.all_reduce(totals, group=group)
    return over_all, totals[0], totals[1]
