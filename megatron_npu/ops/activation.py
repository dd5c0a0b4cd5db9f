"""Activations of the MLP, with the bias of the layer before them: GELU in its tanh form, and SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """Return ``gelu(input + bias)``, tanh form (Hendrycks and Gimpel 2016), as upstream's fused kernel.

    Args:
        input: ``[..., h]``.
        bias: ``[h]``.

    The tanh form is what upstream trains with; the exact (erf) form would change the model silently.
    """
    return F.gelu(input + bias, approximate="tanh")


def bias_gelu_backward(grad: Tensor, input: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of ``bias_gelu`` for ``input``, ``[..., h]``; its sum over rows is the bias's."""
    return torch.ops.aten.gelu_backward(grad, input + bias, approximate="tanh")


def swiglu(input: Tensor) -> Tensor:
    """Return ``silu(a) * b`` for ``input = [a, b]`` (Shazeer 2020): ``[..., 2h]`` to ``[..., h]``."""
    gate, value = input.chunk(2, -1)
    return F.silu(gate) * value


def swiglu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Return the gradient of ``swiglu``: ``[..., h]`` and the forward's ``[..., 2h]`` to ``[..., 2h]``."""
    gate, value = input.chunk(2, -1)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    grad_gate, grad_value = output.chunk(2, -1)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * value, gate))
    torch.mul(grad, F.silu(gate), out=grad_value)
    return output
