"""Define reference kernels for operations that torch_npu uses in place of aten's, mostly backward passes.

These operations have no CPU kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

_MEAN = 1  # aten's number of reduction="mean"


@kernel("matmul_backward")
def matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both operands of ``torch.matmul``.

    Those not requested in ``mask`` are None.
    """
    if self.dim() == 1 and other.dim() == 1:
        return (grad * other if mask[0] else None), (grad * self if mask[1] else None)
    left, right, result = self, other, grad
    if left.dim() == 1:
        left, result = left.unsqueeze(0), result.unsqueeze(-2)
    if right.dim() == 1:
        right, result = right.unsqueeze(-1), result.unsqueeze(-1)
    grads: list[Tensor | None] = [None, None]
    if mask[0]:
        product = result @ right.transpose(-1, -2)
        grads[0] = product.sum_to_size(left.shape).reshape(self.shape)
    if mask[1]:
        if right.dim() == 2 and left.dim() > 2:  # one product instead of a sum over the batch
            product = left.flatten(0, -2).t() @ result.flatten(0, -2)
        else:
            product = (left.transpose(-1, -2) @ result).sum_to_size(right.shape)
        grads[1] = product.reshape(other.shape)
    return grads[0], grads[1]


@kernel("repeat_interleave_backward_int")
def repeat_interleave_backward_int(
    grad: Tensor, input: Tensor, repeats: int, dim: int | None = None
) -> Tensor:
    """Return the gradient of ``repeat_interleave`` with the same count for all slices."""
    return repeat_interleave_backward_tensor(grad, input, torch.tensor([repeats]), dim)


@kernel("repeat_interleave_backward_tensor")
def repeat_interleave_backward_tensor(
    grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None = None
) -> Tensor:
    """Return the gradient of ``repeat_interleave`` with a separate count for each slice.

    If ``dim`` is None, the input is flattened.
    """
    source = input.flatten() if dim is None else input
    along = 0 if dim is None else dim % input.dim()
    index = torch.repeat_interleave(torch.arange(source.size(along)), repeats.expand(source.size(along)))
    summed = torch.zeros_like(source).index_add_(
        along, index, grad.reshape(_replaced(source, along, len(index)))
    )
    return summed.reshape(input.shape)


def _replaced(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if each == dim else length for each, length in enumerate(x.shape)]


@kernel("kl_div_backward")
def kl_div_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = _MEAN, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of ``kl_div`` with respect to its input."""
    grad = -(target.exp() if log_target else target) * grad_output
    return grad / input.numel() if reduction == _MEAN else grad


@kernel("kl_div_target_backward")
def kl_div_target_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = _MEAN, *, log_target: bool = False
) -> Tensor:
    """Return the gradient of ``kl_div`` with respect to its target."""
    if log_target:
        grad = target.exp() * (target + 1 - input)
    else:
        grad = torch.where(target > 0, target.clamp_min(0).log() + 1 - input, 0.0)
    return grad * grad_output / (input.numel() if reduction == _MEAN else 1)


@kernel("l1_loss_backward")
def l1_loss_backward(grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Return the gradient of ``l1_loss`` with respect to its input."""
    grad = torch.sign(input - target) * grad_output
    return grad / input.numel() if reduction == _MEAN else grad


@kernel("one_")
def one_(input: Tensor) -> Tensor:
    """Fill ``input`` with ones, as torch_npu's ``ones`` does."""
    return input.fill_(1)
