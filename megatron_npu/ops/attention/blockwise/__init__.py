"""Compute exact attention in tiles on the CPU.

Windows, packed sequences, masks and dropout do not require a ``[sq, sk]`` tensor.

``function`` contains the differentiable function. A call is computed either by ``fused``, a single compiled
kernel that splits the call into tiles itself, or by ``composed``: ``tiles`` splits the call, ``softmax``
computes the weights, ``dropout`` drops some of them, and ``products`` performs the matmuls; all of these
share the scratch memory in ``buffers``.
"""

from __future__ import annotations

from megatron_npu.ops.attention.blockwise.function import blockwise
from megatron_npu.ops.attention.blockwise.products import multiplies_bf16

__all__ = ["blockwise", "multiplies_bf16"]
