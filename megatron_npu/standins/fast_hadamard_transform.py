"""Stub for ``fast_hadamard_transform``, which DeepSeek's sparse attention uses to rotate indexer vectors."""

from __future__ import annotations

from megatron_npu.ops.hadamard import hadamard_transform

__all__ = ["hadamard_transform"]
__version__ = "1.1+megatron.npu"
