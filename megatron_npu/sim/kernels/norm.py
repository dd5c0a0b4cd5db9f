"""RMSNorm: y = x / sqrt(mean(x²) + epsilon) · gamma, alone and after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return y, like ``input``, and 1 / rms in fp32 with the normalised dimensions kept as 1."""
    x = input.float()
    rstd = torch.rsqrt(x.pow(2).mean(_normalised(input, gamma), keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


@kernel("npu_rms_norm_backward")
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``input`` (its dtype) and ``gamma`` (fp32, as the device returns it)."""
    hat = input.float() * rstd
    scaled = dy.float() * gamma.float()
    projection = (scaled * hat).mean(_normalised(input, gamma), keepdim=True)
    rows = tuple(range(input.dim() - gamma.dim()))
    dgamma = (dy.float() * hat).sum(rows) if rows else dy.float() * hat
    return ((scaled - hat * projection) * rstd).to(input.dtype), dgamma


@kernel("npu_add_rms_norm")
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rms_norm(x1 + x2), its 1 / rms, and the sum; torch_npu gives this operation no gradient."""
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _normalised(input: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """Return the dimensions that gamma spans: the last ones."""
    return tuple(range(input.dim() - gamma.dim(), input.dim()))
