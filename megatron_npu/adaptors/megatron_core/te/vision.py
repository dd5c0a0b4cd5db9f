"""Provide layer specs and norms for the vision models CLIP, ViT and LLaVA.

Patches ``models.vision.clip_vit_model``, ``models.vision.vit_layer_specs`` and
``models.multimodal.llava_spec`` in ``megatron.core``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, te_layers_present
from megatron_npu.adaptors.megatron_core.layers.norm import Norm
from megatron_npu.adaptors.megatron_core.te.redirect import redirect_to_local


@around(
    "megatron.core.models.vision.clip_vit_model:CLIPViTModel.__init__",
    condition=te_layers_present,
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "without TransformerEngine the default norm is torch.nn.LayerNorm, which does not accept the "
        "config passed to it and raises a TypeError"
    ),
)
def with_local_norm(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Use the norm of the local layers instead of TransformerEngine's norm."""
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    for name in ("ln_pre_impl", "ln_post_impl"):
        if given.arguments.get(name) is torch.nn.LayerNorm:
            given.arguments[name] = Norm
    original(*given.args, **given.kwargs)


def _local_vit_layer() -> Any:
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.transformer.enums import AttnMaskType

    layer = vit_layer_specs.get_vit_layer_with_local_spec()
    # Upstream's local layer is causal, unlike TransformerEngine's: patches see all patches.
    layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    return layer


around(
    "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_transformer_engine_spec",
    condition=te_layers_present,
    why="without TransformerEngine the layers are built from a mock; 0.12 always imports it",
)(redirect_to_local(_local_vit_layer))


def _local_llava_layer(qk_layernorm: bool = False, **kwargs: Any) -> Any:
    from megatron.core.models.multimodal import llava_spec

    layer = llava_spec.decoder_model_with_local_default_spec(**kwargs)
    if qk_layernorm:  # which upstream's local layer takes and forgets
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = layer.submodules.input_layernorm
    return layer


around(
    "megatron.core.models.multimodal.llava_spec:decoder_model_with_transformer_engine_default_spec",
    condition=te_layers_present,
    why="without TransformerEngine the layers are built from a mock; 0.12 always imports it",
)(redirect_to_local(_local_llava_layer))
