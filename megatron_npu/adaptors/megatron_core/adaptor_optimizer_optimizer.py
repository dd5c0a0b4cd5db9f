"""``megatron.core.optimizer.optimizer``: many tensors in one call."""

from __future__ import annotations

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import constant, fused_optimizer_present, replace
from megatron_npu.ops import multi_tensor

constant(
    "megatron.core.optimizer.optimizer:multi_tensor_scale_impl",
    multi_tensor.multi_tensor_scale,
    why="without apex and TransformerEngine upstream loops over the gradients in Python",
    condition=fused_optimizer_present,
)


@replace(
    "megatron.core.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies tensor by tensor, bf16 always: a launch for each parameter of the model",
)
def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` to its partner in ``that``."""
    multi_tensor.copy_all(this, that, overflow_buf)
