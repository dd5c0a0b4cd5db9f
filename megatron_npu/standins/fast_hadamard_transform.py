"""``fast_hadamard_transform``, with which DeepSeek's sparse attention rotates its indexer's vectors."""

from __future__ import annotations

from megatron_npu.ops.hadamard import hadamard_transform

__all__ = ["hadamard_transform"]
__version__ = "1.1+megatron.npu"
