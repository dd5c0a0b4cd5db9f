"""Exact tiled attention on the CPU: windows, packed sequences, masks and dropout without ``[sq, sk]``.

``function`` is the differentiable function. A call runs either as ``fused``, one compiled kernel that splits
it itself, or as ``composed``: ``tiles`` splits it, ``softmax`` computes the weights, ``dropout`` drops some,
``products`` multiplies, and all share the scratch memory in ``buffers``.
"""

from __future__ import annotations

from megatron_npu.ops.attention.blockwise.function import blockwise
from megatron_npu.ops.attention.blockwise.products import multiplies_bf16

__all__ = ["blockwise", "multiplies_bf16"]
