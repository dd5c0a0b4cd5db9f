"""Activations on cuda: torch's own kernels; the exact GELU's is the CPU's, too."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.activation import reference
from megatron_npu.ops.activation.native import BiasGelu, Gated

reference.gelu.on("cpu", "cuda", note="`F.gelu`")(F.gelu)
reference.bias_gelu.on("cuda", note="`F.gelu`")(BiasGelu.apply)


@reference.swiglu.on("cuda", note="`F.silu`")
def _swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    return Gated.apply(input, bias, "silu")


@reference.geglu.on("cuda", note="`F.gelu`")
def _geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    return Gated.apply(input, bias, "gelu")
