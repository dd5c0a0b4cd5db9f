"""``megatron.core.transformer.multi_token_prediction``: its layers around a given one."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import without

wrap(
    "megatron.core.transformer.multi_token_prediction:get_mtp_layer_spec",
    condition=transformer_engine_present,
    why="asked for TransformerEngine without it, it ends in an AssertionError or a NameError",
)(without("use_transformer_engine"))
