"""Define reference kernels for RMSNorm, and for RMSNorm and layer norm after a residual addition.

RMSNorm is y = x / sqrt(mean(x²) + epsilon) · gamma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the norm in the dtype of ``input``, and the inverse root mean square in fp32."""
    x = input.float()
    rstd = torch.rsqrt(x.pow(2).mean(_normalised(input, gamma), keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


@kernel("npu_rms_norm_backward")
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``input`` (in its dtype) and ``gamma`` (in fp32, as the device returns it)."""
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
    """Return the RMS norm of ``x1 + x2``, its inverse root mean square, and the sum.

    torch_npu defines no gradient for this operation.
    """
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


@kernel("npu_add_layer_norm")
def npu_add_layer_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the layer norm of ``x1 + x2``, its fp32 mean, its reciprocal deviation and the sum itself.

    The sum is empty unless it is requested.
    """
    total = x1 + x2
    x, dims = total.float(), _normalised(total, gamma)
    mean = x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(x.var(dims, correction=0, keepdim=True) + epsilon)
    y = ((x - mean) * rstd * gamma.float() + beta.float()).to(total.dtype)
    return y, mean, rstd, total if additional_output else total.new_empty(0)


@kernel("npu_add_layer_norm_backward")
def npu_add_layer_norm_backward(
    dy_opt: Tensor | None,
    x1: Tensor,
    x2: Tensor,
    rstd: Tensor,
    mean: Tensor,
    gamma: Tensor,
    dsum_opt: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of the sum twice, in the dtype of the sum, and the gradients of gamma and beta in
    fp32.

    ``dsum_opt`` is the gradient of the sum that the forward pass returned.
    """
    dy = torch.zeros_like(x1).float() if dy_opt is None else dy_opt.float()
    dims = _normalised(x1, gamma)
    hat = ((x1 + x2).float() - mean) * rstd
    scaled = dy * gamma.float()
    projection = scaled.mean(dims, keepdim=True) + hat * (scaled * hat).mean(dims, keepdim=True)
    dx = (scaled - projection) * rstd
    dx = (dx if dsum_opt is None else dx + dsum_opt.float()).to(x1.dtype)
    rows = tuple(range(x1.dim() - gamma.dim()))
    return dx, dx.clone(), (dy * hat).sum(rows), dy.sum(rows)


def _normalised(input: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """Return the normalized dimensions, which are as many of the last dimensions as gamma has."""
    return tuple(range(input.dim() - gamma.dim(), input.dim()))
