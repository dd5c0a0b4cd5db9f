"""SwiGLU, GELU and SiLU; sums of products are computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

FAST_GELU_SLOPE = 1.702  # Hendrycks and Gimpel 2016, section 2: x · sigmoid(1.702 x)


@kernel("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return silu(a) · b for the halves a and b of ``input`` along ``dim``."""
    gate, linear = input.float().chunk(2, dim)
    return (F.silu(gate) * linear).to(input.dtype)


@kernel("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of ``input``."""
    gate, linear = input.float().chunk(2, dim)
    grad = grad_output.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * linear * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([gate_grad, grad * gate * sigmoid], dim).to(input.dtype)


@kernel("npu_fast_gelu", "fast_gelu")
def npu_fast_gelu(input: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x), the form of Atlas A2 and A3."""
    x = input.float()
    return (x * torch.sigmoid(FAST_GELU_SLOPE * x)).to(input.dtype)


@kernel("npu_fast_gelu_backward")
def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Return the gradient of ``input``."""
    x = input.float()
    sigmoid = torch.sigmoid(FAST_GELU_SLOPE * x)
    return (grad.float() * sigmoid * (1 + FAST_GELU_SLOPE * x * (1 - sigmoid))).to(input.dtype)


@kernel("npu_gelu")
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU, exact or in its tanh form."""
    return F.gelu(input, approximate=approximate)


@kernel("npu_gelu_backward")
def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the gradient of ``input``."""
    return torch.ops.aten.gelu_backward(grad_output, input, approximate=approximate)


@kernel("npu_silu")
def npu_silu(input: Tensor) -> Tensor:
    """Return x · sigmoid(x)."""
    return F.silu(input)


@kernel("npu_silu_backward")
def npu_silu_backward(grad_output: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """Return the gradient of ``x0``; the device also takes the output ``x1``."""
    return torch.ops.aten.silu_backward(grad_output, x0)
