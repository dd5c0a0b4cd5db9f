"""``megatron.core.optimizer.clip_grads``: many tensors in one call."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import constant, fused_optimizer_present
from megatron_npu.ops import multi_tensor

_WHY = "without apex and TransformerEngine upstream loops over the gradients in Python"

constant(
    "megatron.core.optimizer.clip_grads:l2_norm_impl",
    multi_tensor.multi_tensor_l2norm,
    why=_WHY,
    condition=fused_optimizer_present,
)
constant(
    "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
    multi_tensor.multi_tensor_scale,
    why=_WHY,
    condition=fused_optimizer_present,
)
