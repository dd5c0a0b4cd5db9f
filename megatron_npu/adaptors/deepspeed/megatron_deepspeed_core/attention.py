"""Patch the core attention of all models of this checkout, its flags, and its unfused softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core import sequence_parallel
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import around, backport, records
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.rotary import side_by_side
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.adaptors.shared.arguments import connect_attention_flags
from megatron_npu.adaptors.shared.decorators import MEMORY_COUNTED

connect_attention_flags(records)
core_attention.connect(records)


@around(
    "megatron.model.transformer:ParallelAttention._checkpointed_attention_forward",
    devices=("npu",),
    why="--recompute-activations saves the values as a view of the QKV projection's output, which keeps all "
    "of it alive; values are copied if their storage is larger than what is used of it" + MEMORY_COUNTED,
)
def recompute(
    original: Callable[..., Tensor],
    self: Any,
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Recompute attention with ``core_attention.recomputed``, passing arguments under this upstream's
    names.
    """
    return core_attention.recomputed(original, self, query_layer, key_layer, value_layer, *args, **kwargs)


_FLASH = ("use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")


@around(
    "megatron.model.transformer:ParallelAttention.__init__",
    why="--use-flash-attn requires two packages and uses a path that ignores masks; CoreAttention is fused "
    "anyway",
)
def initialise_fused(original: Callable[..., None], self: Any, *positional: Any, **keywords: Any) -> None:
    """Build the layer without upstream's flash-attention code, because CoreAttention is already fused."""
    with core_attention.without_flash(*_FLASH):
        original(self, *positional, **keywords)
    if self.enable_ds_sequence_parallel:
        sequence_parallel.give_mask(self.dist_attn)
    core = self.dist_attn.local_attn if self.enable_ds_sequence_parallel else self.core_attention
    core_attention.give_flags(self, core)


@backport(
    "megatron.model.transformer:ParallelAttention.forward",
    why="queries are rotated by one of the two rotary tables and keys by the other, and neither is rotated "
    "with --ds-sequence-parallel-size",
)
def forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    encoder_output: Tensor | None = None,
    inference_params: Any = None,
    rotary_pos_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention layer with the correct rotary tables: map ``[sq, b, h]`` to ``[sq, b, h]``
    and the bias ``[h]``.
    """
    tables = side_by_side(rotary_pos_emb)
    if self.enable_ds_sequence_parallel:
        self.dist_attn.rotary_tables = tables
    return original(
        self,
        hidden_states,
        attention_mask,
        encoder_output=encoder_output,
        inference_params=inference_params,
        rotary_pos_emb=None if tables is None else (tables, tables),
    )
