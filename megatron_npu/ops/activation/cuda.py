"""Compute activation functions on GPUs, with one Triton kernel per direction or with torch's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.activation import native, reference
from megatron_npu.ops.dispatch import takes_kernel
from megatron_npu.ops.triton.activation import BiasGelu, Gated, gelu_of_sum

_NOTE = "one Triton kernel per direction⁶, else {}"


def _beyond(input: Tensor, bias: Tensor | None) -> str | None:
    if not input.dim():
        return "the input has no dimensions"
    if bias is not None and bias.shape != input.shape[-1:]:
        return f"the bias {tuple(bias.shape)} does not match the last dimension of {tuple(input.shape)}"
    return None


@reference.bias_gelu.on("cuda", note=_NOTE.format("`F.gelu`"))
def _bias_gelu(input: Tensor, bias: Tensor | None) -> Tensor:
    if not takes_kernel("bias_gelu", input, bias, beyond=_beyond(input, bias)):
        return native.torch_bias_gelu(input, bias)
    return BiasGelu.apply(input, bias) if torch.is_grad_enabled() else gelu_of_sum(input, bias)


def _beyond_halves(input: Tensor, bias: Tensor | None) -> str | None:
    reason = _beyond(input, bias)
    return (
        f"{input.size(-1)} columns cannot be split into two halves"
        if reason is None and input.size(-1) % 2
        else reason
    )


@reference.swiglu.on("cuda", note=_NOTE.format("`F.silu`"))
def _swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    if not takes_kernel("swiglu", input, bias, beyond=_beyond_halves(input, bias)):
        return native.torch_swiglu(input, bias)
    return Gated.apply(input, bias, "silu")


@reference.geglu.on("cuda", note=_NOTE.format("`F.gelu`"))
def _geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    if not takes_kernel("geglu", input, bias, beyond=_beyond_halves(input, bias)):
        return native.torch_geglu(input, bias)
    return Gated.apply(input, bias, "gelu")
