"""Every field that transformers' configurations have: it becomes a flag, is refused, or has no effect."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import config as config_file
from megatron_npu.conversion import families
from megatron_npu.conversion.config import Config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
# Of each family: its class, and a model in which every field has something to say.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ("Llama", SMALL),
    "mistral": ("Mistral", SMALL | {"sliding_window": 5}),
    "qwen2": ("Qwen2", SMALL | WINDOWS),
    "qwen3": ("Qwen3", SMALL | WINDOWS | {"head_dim": 8}),
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2_moe": ("Qwen2Moe", SMALL | WINDOWS | EXPERTS | {"shared_expert_intermediate_size": 8}),
    "qwen3_moe": ("Qwen3Moe", SMALL | EXPERTS | {"use_sliding_window": True, "sliding_window": 5}),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
# Other values of each field that is read. A field that stands neither here nor in HARMLESS fails the test.
OTHERS: dict[str, list[Any]] = {
    "vocab_size": [41],
    "hidden_size": [32],
    "n_embd": [32],
    "intermediate_size": [32],
    "n_inner": [48],
    "num_hidden_layers": [3],
    "n_layer": [3],
    "num_attention_heads": [4],
    "n_head": [4],
    "num_key_value_heads": [2],
    "head_dim": [4],
    "max_position_embeddings": [64],
    "n_positions": [64],
    "initializer_range": [0.5],
    "hidden_act": ["gelu", "relu"],
    "activation_function": ["gelu", "relu"],
    "rms_norm_eps": [1e-3],
    "layer_norm_epsilon": [1e-3],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 500.0}, YARN],
    "attention_bias": [True],
    "mlp_bias": [True],
    "attention_dropout": [0.5],
    "attn_pdrop": [0.5],
    "resid_pdrop": [0.5],
    "embd_pdrop": [0.5],
    "tie_word_embeddings": [None],  # the other one
    "is_encoder_decoder": [True],
    "add_cross_attention": [True],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "sliding_window": [7],
    "use_sliding_window": [False],
    "max_window_layers": [0],
    "layer_types": [["sliding_attention", "sliding_attention"]],
    "num_local_experts": [5],
    "num_experts": [5],
    "num_experts_per_tok": [1, 3],
    "moe_intermediate_size": [12],
    "shared_expert_intermediate_size": [12],
    "router_aux_loss_coef": [0.5],
    "router_jitter_noise": [0.5],
    "norm_topk_prob": [False],
    "qkv_bias": [False],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[1]],
}
# Fields that are read and change no flag, with the reason.
WITHOUT_EFFECT: dict[str, str] = {
    "output_router_logits": "which adds the loss of balance in training: here its coefficient alone decides",
    "reorder_and_upcast_attn": "how attention is rounded, not what it is",
}
SHAPE_OF_ANSWERS = {"model_type", "return_dict", "dtype"}  # harmless, and nothing to be compared with
HARMLESS_VALUES = {
    "chunk_size_feed_forward": 1,
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1},
    "problem_type": "regression",
    "pretraining_tp": 2,
    "dtype": "float32",
    "transformers_version": "4.0.0",
    "architectures": ["Other"],
    "summary_type": "last",
    "summary_activation": "tanh",
    "summary_first_dropout": 0.5,
}


def kind(family: str) -> type[Any]:
    name, _ = MODELS[family]
    found: type[Any] = getattr(transformers, f"{name}Config")
    return found


@functools.cache
def whole(family: str) -> dict[str, Any]:
    """Return all keys of a small model, as transformers writes them."""
    return dict(kind(family)(**MODELS[family][1]).to_dict())


def flags(family: str, values: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the flags of a config.json, with the vocabulary's size; None: it is refused."""
    found = Config(values, Path("model/config.json"))
    try:
        size = found.number("vocab_size")
        return (*families.FAMILIES[family].flags(found), str(size))
    except UsageError:
        return None


def fields(family: str) -> list[str]:
    return sorted({field.name for field in dataclasses.fields(kind(family))} | set(whole(family)))


def others(name: str, value: Any) -> list[Any]:
    return [not value] if OTHERS[name] == [None] else OTHERS[name]


@pytest.mark.parametrize("family", MODELS)
def test_every_family_has_a_model_here(family):
    assert MODELS.keys() == families.FAMILIES.keys()
    assert flags(family, whole(family)) is not None


@pytest.mark.parametrize("family", MODELS)
def test_each_field_is_a_flag_or_refused_or_known_to_have_no_effect(family):
    values = whole(family)
    plain = flags(family, values)
    for name in fields(family):
        if name in config_file.HARMLESS:
            continue
        if name in WITHOUT_EFFECT:
            assert flags(family, {**values, name: not values[name]}) == plain, name
            continue
        for other in others(name, values.get(name)):
            changed = {**values, name: other}
            if name in ("use_sliding_window", "max_window_layers", "num_hidden_layers"):
                changed.pop("layer_types", None)  # which says it as well
            assert flags(family, changed) != plain, (name, other)


@pytest.mark.parametrize("family", MODELS)
def test_a_field_that_is_absent_has_the_default_of_transformers_or_is_refused(family):
    values = {key: value for key, value in whole(family).items() if key != "layer_types"}
    for name in fields(family):
        if name in ("model_type", "layer_types") or name not in values:
            continue
        absent = {key: value for key, value in values.items() if key != name}
        assert flags(family, absent) in (None, filled_by_transformers(family, absent)), name


def filled_by_transformers(family: str, values: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the flags of what transformers makes of a config.json; None: it refuses that, too."""
    try:
        return flags(family, kind(family).from_dict(dict(values)).to_dict())
    except StrictDataclassError:
        return None


@pytest.mark.parametrize("family", MODELS)
def test_a_harmless_field_changes_no_logit(family):
    names = [name for name in fields(family) if name in config_file.HARMLESS and name not in SHAPE_OF_ANSWERS]
    tokens = torch.arange(12)[None]
    torch.manual_seed(0)
    made = model(family, {}).eval()
    with torch.no_grad():
        expected = made(tokens).logits
        for name in names:
            changed = model(family, {name: HARMLESS_VALUES.get(name, other(whole(family).get(name)))}).eval()
            changed.load_state_dict(made.state_dict())
            assert torch.equal(changed(tokens, return_dict=True).logits, expected), name


def other(value: Any) -> Any:
    """Return another value of a harmless field: of a switch the other one, of a token's id a small one."""
    return not value if isinstance(value, bool) else 3


def model(family: str, changes: dict[str, Any]) -> Any:
    config = kind(family).from_dict({**whole(family), **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
