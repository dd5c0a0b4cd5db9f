"""``megatron.core.fusions.fused_bias_gelu``: the differentiable function that the MLP takes."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, constant
from megatron_npu.ops import activation

constant(
    "megatron.core.fusions.fused_bias_gelu:bias_gelu_impl",
    activation.bias_gelu,
    devices=WITHOUT_CUDA,
    why="eight element-wise passes, and a bias gradient added up in 16 bits; on cuda upstream compiles it",
)
