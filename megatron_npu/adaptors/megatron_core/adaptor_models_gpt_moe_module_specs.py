"""``megatron.core.models.gpt.moe_module_specs``: experts of local layers."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import without

wrap(
    "megatron.core.models.gpt.moe_module_specs:get_moe_module_spec",
    condition=transformer_engine_present,
    why="its default is TransformerEngine: a NameError in 0.12, layers of a mock since",
)(without("use_te"))
