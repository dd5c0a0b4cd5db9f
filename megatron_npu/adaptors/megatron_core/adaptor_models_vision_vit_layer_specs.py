"""``megatron.core.models.vision.vit_layer_specs``: the local layer of a vision transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import instead, named


def _local_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_vit_layer() -> Any:
        from megatron.core.transformer.enums import AttnMaskType

        layer = named("get_vit_layer_with_local_spec")(original)()
        # Upstream's local layer is causal, unlike TransformerEngine's: patches see all patches.
        layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
        return layer

    return get_vit_layer


wrap(
    "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_transformer_engine_spec",
    condition=transformer_engine_present,
    why="without TransformerEngine its layers are made of a mock; 0.12 imports it always",
)(instead(_local_layer))
