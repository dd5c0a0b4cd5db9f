"""Activations on cuda: torch's own kernels."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.ops.activation import reference
from megatron_npu.ops.activation.native import BiasGelu, Gated

reference.bias_gelu.on("cuda", note="`F.gelu`")(BiasGelu.apply)


@reference.swiglu.on("cuda", note="`F.silu`")
def _swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    return Gated.apply(input, bias, "silu")


@reference.geglu.on("cuda", note="`F.gelu`")
def _geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    return Gated.apply(input, bias, "gelu")
