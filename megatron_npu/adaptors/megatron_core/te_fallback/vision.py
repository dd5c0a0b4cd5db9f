"""Layer specs and norms of the models for images: CLIP, ViT and LLaVA."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.norm import Norm
from megatron_npu.adaptors.megatron_core.te_fallback.redirect import instead, named


@wrap(
    "megatron.core.models.vision.clip_vit_model:CLIPViTModel.__init__",
    condition=transformer_engine_present,
    why="without TransformerEngine its default norm is torch.nn.LayerNorm, which does not take the config "
    "that it is then given: TypeError",
)
def with_our_norm(original: Callable[..., None]) -> Callable[..., None]:
    """Take the norm of the local layers in its place."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name in ("ln_pre_impl", "ln_post_impl"):
            if given.arguments.get(name) is torch.nn.LayerNorm:
                given.arguments[name] = Norm
        original(*given.args, **given.kwargs)

    return initialise


def _local_vit_layer(original: Callable[..., Any]) -> Callable[..., Any]:
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
)(instead(_local_vit_layer))


def _local_llava_layer(original: Callable[..., Any]) -> Callable[..., Any]:
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
)(instead(_local_llava_layer))
