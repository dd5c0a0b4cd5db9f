"""Patch ``megatron.core.fusions.fused_softmax``, which runs if fused attention does not support a call."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import installed, replace
from megatron_npu.adaptors.shared.core_attention import forward_fused_softmax

_SOFTMAX = "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax"
_replace = partial(
    replace,
    condition=partial(installed, "scaled_masked_softmax_cuda"),
    why="upstream's kernels are apex extensions for CUDA",
)


@_replace(f"{_SOFTMAX}.is_kernel_available")
def is_kernel_available(self: Any, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
    """Return True if our ``forward_fused_softmax`` gives the same result as upstream's torch code for the
    arguments.
    """
    if not self.scaled_masked_softmax_fusion or getattr(self, "window_size", None) is not None:
        return False
    # Upstream's torch path leaves a given mask alone, and asks for a square one if there is none.
    return self.attn_mask_type.name != "causal" or (mask is None and sq == sk)


_replace(f"{_SOFTMAX}.forward_fused_softmax")(forward_fused_softmax)
