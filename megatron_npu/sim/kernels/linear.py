"""Define a reference kernel that computes ``x · weightᵀ + bias`` in one operation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_linear")
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input`` ``[m, k]`` times the transpose of ``weight`` ``[n, k]``, plus ``bias`` ``[n]``."""
    return F.linear(input, weight, bias)


@kernel("npu_linear_backward")
def npu_linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``input`` and ``weight``, given the output's gradient ``[m, n]``."""
    return grad @ weight, grad.t() @ input
