"""``megatron.core.fusions.fused_bias_geglu``: the differentiable function that the MLP takes."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace
from megatron_npu.ops import activation


@replace(
    "megatron.core.fusions.fused_bias_geglu:bias_geglu_impl",
    devices=WITHOUT_CUDA,
    why="a chain of passes, and a bias gradient added up in 16 bits; on cuda upstream compiles it",
)
def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """``[s, b, 2h]`` (or ``[t, 2h]``) and the ``[2h]`` bias to ``[s, b, h]``."""
    return activation.geglu(input, bias)
