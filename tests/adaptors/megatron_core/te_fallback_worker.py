"""What each function of megatron-core that asks for TransformerEngine is to give without it.

Run as a module it compares them all with the megatron-core on the path, of any version:

    python -m tests.adaptors.megatron_core.te_fallback_worker
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

GPT = "megatron.core.models.gpt.gpt_layer_specs"
MOE = "megatron.core.models.gpt.moe_module_specs"
T5 = "megatron.core.models.T5.t5_spec"
RETRO = "megatron.core.models.retro"
MTP = "megatron.core.transformer.multi_token_prediction"

_EXPERTS = {"num_experts": 4, "qk_layernorm": True}
_LATENT = {"multi_latent_attention": True, "qk_layernorm": True}
_OURS = {"normalization": "RMSNorm"}  # the norm that goes by the config

# (module, what asks for TransformerEngine, its arguments, what it is to give, its arguments)
Same = tuple[str, str, dict[str, Any], str, dict[str, Any]]
SAME: list[Same] = [
    (GPT, "get_gpt_layer_with_transformer_engine_spec", {}, "get_gpt_layer_local_spec", _OURS),
    (
        GPT,
        "get_gpt_layer_with_transformer_engine_spec",
        _EXPERTS,
        "get_gpt_layer_local_spec",
        _EXPERTS | _OURS,
    ),
    (GPT, "get_gpt_layer_with_transformer_engine_spec", _LATENT, "get_gpt_layer_local_spec", _LATENT | _OURS),
    (GPT, "get_mlp_module_spec", {}, "get_mlp_module_spec", {"use_te": False}),
    (
        GPT,
        "get_mlp_module_spec",
        {"num_experts": 2},
        "get_mlp_module_spec",
        {"use_te": False, "num_experts": 2},
    ),
    (
        MOE,
        "get_moe_module_spec",
        {"num_experts": 2},
        "get_moe_module_spec",
        {"use_te": False, "num_experts": 2},
    ),
    (T5, "encoder_model_with_transformer_engine_default_spec", {}, "encoder_model_with_local_spec", {}),
    (T5, "decoder_model_with_transformer_engine_default_spec", {}, "decoder_model_with_local_spec", {}),
    *(
        (
            T5,
            f"get_t5_{part}_with_transformer_engine_block_spec",
            {"num_layers": 2},
            f"get_t5_{part}_with_local_block_spec",
            {"num_layers": 2},
        )
        for part in ("encoder", "decoder")
    ),
]
# Retro left megatron-core with 0.16.
RETRO_SAME: list[Same] = [
    (
        f"{RETRO}.{part}_spec",
        f"get_retro_{part}_layer_te_spec",
        {},
        f"get_retro_{part}_layer_local_spec",
        {},
    )
    for part in ("encoder", "decoder")
]


def specified(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """Return the spec that a function of megatron-core gives."""
    return getattr(importlib.import_module(module), name)(**arguments)


def asked_and_local(case: Same) -> tuple[Any, Any]:
    """Return the spec that is asked for and the local one."""
    module, asked, arguments, local, local_arguments = case
    return specified(module, asked, arguments), specified(module, local, local_arguments)


def bert_layers() -> tuple[Any, Any]:
    """Return the same for BERT, whose local layer is a constant."""
    module = importlib.import_module("megatron.core.models.bert.bert_layer_specs")
    named = module.bert_layer_with_transformer_engine_spec
    assert named == module.get_bert_layer_with_transformer_engine_spec()
    assert named is not module.bert_layer_local_spec, "the model writes into it"
    return named, module.bert_layer_local_spec


def image_layers() -> list[tuple[Any, Any]]:
    """Return the same for the layers of ViT, but for the mask, and of LLaVA's language model."""
    vit = importlib.import_module("megatron.core.models.vision.vit_layer_specs")
    mine, local = vit.get_vit_layer_with_transformer_engine_spec(), vit.get_vit_layer_with_local_spec()
    attention, masked = mine.submodules.self_attention, local.submodules.self_attention
    assert attention.params["attn_mask_type"].name == "no_mask", "patches see all patches"
    masked.params = attention.params
    llava = importlib.import_module("megatron.core.models.multimodal.llava_spec")
    return [
        (mine, local),
        (
            llava.decoder_model_with_transformer_engine_default_spec(),
            llava.decoder_model_with_local_default_spec(),
        ),
    ]


def heard() -> Callable[[], int]:
    """Return what tells how often TransformerEngine has been asked for since."""
    from megatron_npu.ops import dispatch

    def count() -> int:
        return sum(calls for (what, _), calls in dispatch.fallbacks.items() if what == "transformer_engine")

    before = count()
    return lambda: count() - before


def _nobody_else_is_misled() -> None:
    """Who asks for TransformerEngine is still told that it is not there (0.12's module is a stand-in)."""
    for name in (GPT, T5, "megatron.core.transformer.heterogeneous.linear_replacements"):
        assert not importlib.import_module(name).HAVE_TE, name


def main() -> None:
    """Compare all."""
    import megatron_npu

    megatron_npu.install()
    from packaging.version import Version

    from megatron_npu.upstream import megatrons

    retro = RETRO_SAME if Version(megatrons.find().version) < Version("0.16") else []
    for case in [*SAME, *retro]:
        asked = heard()
        mine, local = asked_and_local(case)
        assert mine == local, case
        assert asked(), case
    asked = heard()
    for mine, local in [bert_layers(), *image_layers()]:
        assert mine == local
    assert asked() == 3
    _nobody_else_is_misled()
    bad = [row for row in megatron_npu.ledger().rows if row.state in ("failed", "drifted")]
    assert not bad, bad


if __name__ == "__main__":
    main()
