"""Compute activation functions with torch's kernels, saving only the inputs for the backward pass.

These functions are used on cpu, and on cuda without Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.activation import reference
from megatron_npu.ops.products.bias_gradient import bias_gradient


def with_bias(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``input + bias`` in the dtype of ``input``."""
    return input if bias is None else (input + bias).to(input.dtype)


class BiasGelu(torch.autograd.Function):
    """Compute ``F.gelu`` of ``input + bias`` as an autograd function.

    The backward pass recomputes the sum.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, bias)
        return F.gelu(with_bias(input, bias), approximate="tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        input, bias = ctx.saved_tensors
        z = with_bias(input, bias)
        result = torch.ops.aten.gelu_backward(grad, z, approximate="tanh")
        return result, bias_gradient(result, bias)


class Gated(torch.autograd.Function):
    """Compute ``curve(a) * b`` for ``input + bias = [a, b]``, where ``curve`` is ``silu`` or ``gelu``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, curve: str) -> Tensor:
        ctx.save_for_backward(input, bias)
        ctx.curve = curve
        gate, value = with_bias(input, bias).chunk(2, -1)
        return _value(curve, gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, bias = ctx.saved_tensors
        gate, value = with_bias(input, bias).chunk(2, -1)
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        d_gate, d_value = output.chunk(2, -1)
        torch.mul(grad, _value(ctx.curve, gate), out=d_value)
        d_gate.copy_(_gradient(ctx.curve, grad * value, gate))
        return output, bias_gradient(output, bias), None


def _value(curve: str, gate: Tensor) -> Tensor:
    return F.silu(gate) if curve == "silu" else F.gelu(gate, approximate="tanh")


def _gradient(curve: str, grad: Tensor, gate: Tensor) -> Tensor:
    if curve == "silu":
        return torch.ops.aten.silu_backward(grad, gate)
    return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")


reference.gelu.on("cpu", "cuda", note="`F.gelu`")(F.gelu)


def torch_bias_gelu(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``gelu(input + bias)`` in tanh form, computed by torch's kernels."""
    if torch.is_grad_enabled():
        return BiasGelu.apply(input, bias)
    return F.gelu(with_bias(input, bias), approximate="tanh")  # autograd would cost more than one token's row


@reference.swiglu.on("cpu", note="`F.silu`")
def torch_swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return the SwiGLU of ``input + bias``, computed by torch's kernels."""
    return Gated.apply(input, bias, "silu")


@reference.geglu.on("cpu", note="`F.gelu`")
def torch_geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return the GEGLU of ``input + bias``, computed by torch's kernels."""
    return Gated.apply(input, bias, "gelu")
