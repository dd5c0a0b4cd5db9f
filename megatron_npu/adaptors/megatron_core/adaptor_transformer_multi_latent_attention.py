"""``megatron.core.transformer.multi_latent_attention``: whether TransformerEngine is there."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import constant, transformer_engine_present

constant(
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    False,
    versions=">=0.14",
    condition=transformer_engine_present,
    why="upstream takes it for present because its own wrapper can be imported without it, and asks then "
    "whether a layer is an instance of None: TypeError",
)
