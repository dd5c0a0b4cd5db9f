"""Compute activation functions with torch_npu's kernels.

``npu_fast_gelu`` is not used: x·sigmoid(1.702·x) differs by up to 0.02 from both forms of GELU and would
train a different model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.activation import reference
from megatron_npu.ops.activation.native import with_bias
from megatron_npu.ops.dispatch import unsupported_dtype
from megatron_npu.ops.products.bias_gradient import bias_gradient


class _Gelu(torch.autograd.Function):
    """Compute exact (erf) GELU with torch_npu's ``npu_gelu`` kernel."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        import torch_npu

        ctx.save_for_backward(input)
        return torch_npu.npu_gelu(input.contiguous(), approximate="none")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return torch.ops.npu.npu_gelu_backward(grad.contiguous(), input.contiguous(), approximate="none")


reference.gelu.on("npu", note="`npu_gelu`")(_Gelu.apply)


class _BiasGelu(torch.autograd.Function):
    """Compute GELU (tanh form) of ``input + bias`` with torch_npu's ``npu_gelu`` kernel.

    The form that ``aten::gelu`` computes on an NPU depends on the CANN version.

    The sum is saved instead of the input, which nothing else needs: this takes the same memory and one kernel
    launch fewer.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        import torch_npu

        z = with_bias(input, bias)
        ctx.save_for_backward(z, bias)
        return torch_npu.npu_gelu(z, approximate="tanh")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        z, bias = ctx.saved_tensors
        result = torch.ops.npu.npu_gelu_backward(grad.contiguous(), z, approximate="tanh")
        return result, bias_gradient(result, bias)


reference.bias_gelu.on("npu", note="`npu_gelu`")(_BiasGelu.apply)


class _SwiGLU(torch.autograd.Function):
    """Compute SwiGLU of ``input + bias`` with torch_npu's ``npu_swiglu`` kernel.

    The backward pass recomputes the sum.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        import torch_npu

        ctx.save_for_backward(input, bias)
        return torch_npu.npu_swiglu(with_bias(input, bias), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        input, bias = ctx.saved_tensors
        result = torch.ops.npu.npu_swiglu_backward(grad.contiguous(), with_bias(input, bias), dim=-1)
        return result, bias_gradient(result, bias)


def _beyond_swiglu(input: Tensor, bias: Tensor | None) -> str | None:
    if input.dim() > 8:
        return f"npu_swiglu supports at most 8 dimensions, but the input has {input.dim()}"
    return unsupported_dtype("npu_swiglu", input.dtype)


reference.swiglu.on("npu", supports=_beyond_swiglu, note="`npu_swiglu`", limits="at most 8 dimensions")(
    _SwiGLU.apply
)


class _GEGLU(torch.autograd.Function):
    """Compute GEGLU, using torch_npu's ``npu_gelu`` kernel for the left half of the input.

    ``npu_geglu`` is not used, because there is no reference to verify it against.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        import torch_npu

        ctx.save_for_backward(input, bias)
        gate, value = with_bias(input, bias).chunk(2, -1)
        return torch_npu.npu_gelu(gate.contiguous(), approximate="tanh").mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        import torch_npu

        input, bias = ctx.saved_tensors
        gate, value = (half.contiguous() for half in with_bias(input, bias).chunk(2, -1))
        d_value = torch_npu.npu_gelu(gate, approximate="tanh").mul_(grad)
        d_gate = torch.ops.npu.npu_gelu_backward(grad * value, gate, approximate="tanh")
        result = torch.cat([d_gate, d_value], -1)
        return result, bias_gradient(result, bias)


reference.geglu.on("npu", note="`npu_gelu` and a multiplication")(_GEGLU.apply)
