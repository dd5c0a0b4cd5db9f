"""Stub for ``transformer_engine.common``, which contains low-precision recipes."""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import recipe

__all__ = ["recipe"]
