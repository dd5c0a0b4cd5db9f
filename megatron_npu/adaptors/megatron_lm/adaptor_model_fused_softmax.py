"""``megatron.model.fused_softmax``: for attention that does not go through ``ops.attention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import replace
from megatron_npu.ops import softmax

_WHY = "upstream's kernels are CUDA extensions that it compiles at start"


@replace("megatron.model.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available", why=_WHY)
def is_kernel_available(self: Any, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
    """Return whether ``forward_fused_softmax`` means the same as upstream's torch path for this call."""
    return self.scaled_masked_softmax_fusion and (self.attn_mask_type.name != "causal" or sq == sk)


@replace("megatron.model.fused_softmax:FusedScaleMaskSoftmax.forward_fused_softmax", why=_WHY)
def forward_fused_softmax(self: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """``[b, n, sq, sk]`` scores to probabilities of the same shape and dtype.

    A causal mask that forbids more than the future (``--reset-attention-mask``) counts; upstream's causal
    kernel ignores it.
    """
    causal = self.attn_mask_type.name == "causal"
    return softmax.scale_mask_softmax(input, mask, self.scale, causal)
