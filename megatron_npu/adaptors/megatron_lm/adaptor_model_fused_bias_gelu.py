"""``megatron.model.fused_bias_gelu``: the differentiable function that the MLP takes."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import constant
from megatron_npu.ops import activation

constant(
    "megatron.model.fused_bias_gelu:bias_gelu_impl",
    activation.bias_gelu,
    why="eight element-wise passes forward and more backward; nvfuser, which joined them, is gone",
)
