"""Stub for ``transformer_engine.common``, which contains recipes for low precision."""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import recipe

__all__ = ["recipe"]
