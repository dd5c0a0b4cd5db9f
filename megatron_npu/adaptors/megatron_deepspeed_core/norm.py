"""Layer norm and RMS norm: those of ``megatron.model`` for devices other than CUDA."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_deepspeed_core.decorators import replace
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.adaptors.shared.fused_kernels import mixed_layer_norm
from megatron_npu.ops import norm


@replace(
    "megatron.model.layernorm:SPLayerNorm.forward",
    devices=WITHOUT_CUDA,
    why="torch's refuses a weight of another dtype than the input, as with --fp32-residual-connection",
)
def forward(self: Any, x: Tensor) -> Tensor:
    """``[..., h]`` to ``[..., h]`` in the dtype of the weight."""
    return mixed_layer_norm(x, self.weight, self.bias, self.eps)


@replace("megatron.model.rmsnorm:RMSNorm.forward", devices=WITHOUT_CUDA, why="six passes over its input")
def forward_rms(self: Any, x: Tensor) -> Tensor:
    """``[..., h]`` to ``[..., h]``, the mean square in fp32 (Zhang and Sennrich 2019)."""
    return norm.rms_norm(x, self.weight, self.eps)
