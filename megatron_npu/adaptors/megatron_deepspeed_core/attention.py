"""Core attention of every model of this tree, its flags, and the softmax for what does not go through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_deepspeed_core.decorators import around, records
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.adaptors.shared.arguments import connect_attention_flags

connect_attention_flags(records)
core_attention.connect(records)

_FLASH = ("use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")


@around(
    "megatron.model.transformer:ParallelAttention.__init__",
    why="--use-flash-attn asks for two packages and takes a path that ignores masks; CoreAttention is fused",
)
def initialise_fused(original: Callable[..., None], self: Any, *positional: Any, **keywords: Any) -> None:
    """Build the layer without upstream's flash path, which CoreAttention makes superfluous."""
    with core_attention.without_flash(*_FLASH):
        original(self, *positional, **keywords)
    core = self.dist_attn.local_attn if self.enable_ds_sequence_parallel else self.core_attention
    core_attention.give_flags(self, core)
