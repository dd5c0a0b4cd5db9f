"""Define reference kernels for SwiGLU and GELU, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return ``silu(a) · b``, where a and b are the halves of ``input`` along ``dim``."""
    gate, linear = input.float().chunk(2, dim)
    return (F.silu(gate) * linear).to(input.dtype)


@kernel("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of ``npu_swiglu`` with respect to ``input``."""
    gate, linear = input.float().chunk(2, dim)
    grad = grad_output.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * linear * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([gate_grad, grad * gate * sigmoid], dim).to(input.dtype)


@kernel("npu_gelu")
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU of ``input`` in its exact form or its tanh form."""
    return F.gelu(input, approximate=approximate)


@kernel("npu_gelu_backward")
def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the gradient of ``npu_gelu`` with respect to ``input``."""
    return torch.ops.aten.gelu_backward(grad_output, input, approximate=approximate)
