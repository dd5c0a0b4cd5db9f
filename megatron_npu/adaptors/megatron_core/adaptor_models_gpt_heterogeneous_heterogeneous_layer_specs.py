"""``megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs``: blocks of different shapes."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import without

wrap(
    "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs:get_gpt_heterogeneous_layer_spec",
    condition=transformer_engine_present,
    why="asked for TransformerEngine without it, its layers are None",
)(without("use_te"))
