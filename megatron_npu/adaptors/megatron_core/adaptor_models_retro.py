"""``megatron.core.models.retro``: local layers and blocks. Megatron-core has no Retro since 0.16."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import instead, named, without

for _part in ("encoder", "decoder"):
    _layer = f"get_retro_{_part}_layer"
    wrap(
        f"megatron.core.models.retro.{_part}_spec:{_layer}_te_spec",
        versions="<0.16",
        condition=transformer_engine_present,
        why="without TransformerEngine it ends in a NameError",
    )(instead(named(f"{_layer}_local_spec")))
    wrap(
        f"megatron.core.models.retro.{_part}_spec:get_retro_{_part}_block_spec",
        versions="<0.16",
        condition=transformer_engine_present,
        why="asked for TransformerEngine without it, it ends in a NameError",
    )(without("use_transformer_engine"))
