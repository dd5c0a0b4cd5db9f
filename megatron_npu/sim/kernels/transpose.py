"""Transpose and reshape in one operation."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_confusion_transpose")
def npu_confusion_transpose(
    input: Tensor, perm: list[int], shape: list[int], transpose_first: bool
) -> Tensor:
    """Return ``input.permute(perm).reshape(shape)``, or with ``transpose_first`` false the two swapped."""
    if transpose_first:
        return input.permute(perm).reshape(shape).contiguous()
    return input.reshape(shape).permute(perm).contiguous()


@kernel("npu_confusion_transpose_backward")
def npu_confusion_transpose_backward(
    grad: Tensor, perm: list[int], shape: list[int], transpose_first: bool
) -> Tensor:
    """Return the gradient; torch_npu passes the shape of the forward's input and ``not transpose_first``."""
    inverse = [perm.index(dim) for dim in range(len(perm))]
    if transpose_first:  # the forward reshaped first
        return grad.permute(inverse).reshape(shape).contiguous()
    return grad.reshape([shape[dim] for dim in perm]).permute(inverse).contiguous()
