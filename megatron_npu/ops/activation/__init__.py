"""Compute activation functions (GELU, SwiGLU and GEGLU) fused with the bias of the preceding layer.

No implementation saves more than its inputs for the backward pass. ``native`` is used on cpu, and on cuda if
there is no Triton kernel; ``cpu`` contains faster implementations for CPUs, ``npu`` contains the NPU kernels,
and ``reference`` defines the expected results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.activation import (  # noqa: F401  (devices register themselves)
    cpu,
    cuda,
    native,
    npu,
    reference,
)
from megatron_npu.ops.dispatch import Make

__all__ = ["bias_gelu", "geglu", "gelu", "swiglu", "swiglu_backward"]


def gelu(input: Tensor) -> Tensor:
    """Return exact (erf) ``gelu(input)`` (Hendrycks and Gimpel 2016), which BERT and ViT use.

    Args:
        input: ``[...]``, fp32, bf16 or fp16.

    Returns:
        ``[...]`` in the dtype of ``input``.
    """
    return reference.gelu(input)


def bias_gelu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``gelu(input + bias)`` in tanh form (Hendrycks and Gimpel 2016), like upstream's fused kernel.

    Args:
        input: ``[..., h]``, fp32, bf16 or fp16.
        bias: ``[h]``, or None.

    Returns:
        ``[..., h]`` in the dtype of ``input``.

    Upstream trains with the tanh form; the exact (erf) form would change the model without any error.
    """
    return reference.bias_gelu(input, bias)


def swiglu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``silu(a) * b`` for ``input + bias = [a, b]`` (Shazeer 2020).

    Args:
        input: ``[..., 2h]``, fp32, bf16 or fp16.
        bias: ``[2h]``, or None.

    Returns:
        ``[..., h]`` in the dtype of ``input``.
    """
    return reference.swiglu(input, bias)


def swiglu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Return the gradient ``[..., 2h]`` of the input of ``swiglu``, given the output's gradient ``[..., h]``
    and the input ``[..., 2h]``.

    This is used by upstream's autograd functions, which save the input themselves.
    """
    gate, value = input.chunk(2, -1)
    output = input.new_empty(input.shape)
    grad_gate, grad_value = output.chunk(2, -1)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * value, gate))
    torch.mul(grad, F.silu(gate), out=grad_value)
    return output


def geglu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``gelu(a) * b`` (tanh form) for ``input + bias = [a, b]`` (Shazeer 2020).

    The shapes are those of ``swiglu``.
    """
    return reference.geglu(input, bias)


@reference.gelu.example()
def _gelu_example(make: Make) -> Tensor:
    return gelu(make(64, 2, 128))


@reference.bias_gelu.example()
def _bias_gelu_example(make: Make) -> Tensor:
    return bias_gelu(make(64, 2, 128), make(128))


@reference.swiglu.example()
def _swiglu_example(make: Make) -> Tensor:
    return swiglu(make(64, 2, 128))


@reference.geglu.example()
def _geglu_example(make: Make) -> Tensor:
    return geglu(make(64, 2, 128))
