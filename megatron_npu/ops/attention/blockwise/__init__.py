"""Exact attention tile by tile on the CPU: windows, packed sequences, masks and dropout without ``[sq, sk]``.

``function`` is the differentiable function, ``tiles`` cuts its work. A tile is either ``fused``, one kernel,
or ``composed``: ``softmax`` computes its weights, ``products`` multiplies, in ``buffers`` that all tiles of a
call share. ``dropout`` draws for both.
"""

from __future__ import annotations

from megatron_npu.ops.attention.blockwise.function import blockwise
from megatron_npu.ops.attention.blockwise.products import multiplies_bf16

__all__ = ["blockwise", "multiplies_bf16"]
