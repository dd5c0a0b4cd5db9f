"""``transformer_engine.common``: the recipes of low precision."""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import recipe

__all__ = ["recipe"]
