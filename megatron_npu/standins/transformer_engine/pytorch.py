"""Stub for ``transformer_engine.pytorch`` with the names that megatron-core imports from it."""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import attention, distributed, fp8, ops, tensor
from megatron_npu.standins.transformer_engine.attention import DotProductAttention
from megatron_npu.standins.transformer_engine.distributed import checkpoint
from megatron_npu.standins.transformer_engine.fp8 import fp8_autocast, fp8_model_init
from megatron_npu.standins.transformer_engine.grouped import GroupedLinear
from megatron_npu.standins.transformer_engine.layers import LayerNormLinear, LayerNormMLP, Linear
from megatron_npu.standins.transformer_engine.norms import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "attention",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "tensor",
]
