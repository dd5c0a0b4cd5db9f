"""``megatron.core.models.multimodal.llava_spec``: the local layer of the language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.te_fallback import instead, named


def _local_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def decoder_model(qk_layernorm: bool = False, **kwargs: Any) -> Any:
        layer = named("decoder_model_with_local_default_spec")(original)(**kwargs)
        if qk_layernorm:  # which upstream's local layer takes and forgets
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = layer.submodules.input_layernorm
        return layer

    return decoder_model


wrap(
    "megatron.core.models.multimodal.llava_spec:decoder_model_with_transformer_engine_default_spec",
    condition=transformer_engine_present,
    why="without TransformerEngine its layers are made of a mock; 0.12 imports it always",
)(instead(_local_layer))
