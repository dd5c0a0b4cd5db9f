"""Exact tiled attention on the CPU: windows, packed sequences, masks and dropout without ``[sq, sk]``.

``function`` is the differentiable function. A call is either ``fused``, one kernel that cuts it up by
itself, or ``composed``: of ``tiles``, whose weights ``softmax`` computes and ``dropout`` drops, and which
``products`` multiplies, in ``buffers`` that all of them share.
"""

from __future__ import annotations

from megatron_npu.ops.attention.blockwise.function import blockwise
from megatron_npu.ops.attention.blockwise.products import multiplies_bf16

__all__ = ["blockwise", "multiplies_bf16"]
