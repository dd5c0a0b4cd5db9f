"""config.json: what it means as flags, and that nothing in it is overlooked."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.conversion import families
from megatron_npu.conversion.config import Config, read
from megatron_npu.errors import UsageError

GPT2 = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def flags(values: dict, **changes: object) -> str:
    config = Config({**values, **changes}, Path("model/config.json"))
    family = families.of_config(config)
    config.number("vocab_size")
    return " ".join(family.flags(config))


def test_what_is_absent_has_the_default_of_transformers():
    said = flags(GPT2)
    assert "--ffn-hidden-size 32" in said
    assert "--norm-epsilon 1e-05 --attention-dropout 0.1 --hidden-dropout 0.1" in said
    said = flags(LLAMA)
    assert "--num-query-groups 4 --kv-channels 2" in said
    assert "--norm-epsilon 1e-06" in said
    assert "--rotary-base 10000" in said
    assert "--untie-embeddings-and-output-weights" in said
    assert "rope-scaling" not in said


@pytest.mark.parametrize("form", ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"])
def test_the_two_forms_of_gelu(form):
    assert "--no-bias-gelu-fusion" not in flags(GPT2, activation_function=form)
    assert "--no-bias-gelu-fusion" in flags(GPT2, activation_function="gelu")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
    ids=["transformers 4", "with the old key", "transformers 5"],
)
def test_the_rotary_embedding_of_llama_3(rope):
    said = flags(LLAMA, **rope)
    assert "--rotary-base 500000 --rope-scaling-factor 32.0" in said
    assert "--use-rope-scaling" in said


def test_a_window_counts_the_own_token_and_null_is_none():
    assert "--pre-tockens 6 " in flags(MISTRAL, sliding_window=7)
    assert "tockens" not in flags(MISTRAL, sliding_window=None)
    assert "--pre-tockens 4095 " in flags(MISTRAL)  # the default of transformers


def test_what_sets_the_kin_apart():
    assert "--add-qkv-bias" not in flags(LLAMA)
    assert "--disable-bias-linear --add-qkv-bias" in flags(QWEN2)
    said = flags(QWEN3)
    assert "--kv-channels 6" in said
    assert "--qk-layernorm" in said
    assert "--kv-channels 128" in flags({key: QWEN3[key] for key in QWEN3 if key != "head_dim"})


@pytest.mark.parametrize("values", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_windows_that_are_off_mean_nothing(values):
    off = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1, "use_mrope": False}
    assert flags(values, **off, layer_types=["full_attention"] * 2) == flags(values)


@pytest.mark.parametrize(
    ("values", "changes", "named"),
    [
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window"),
        (MISTRAL, {"num_key_value_heads": None}, "num_key_value_heads"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"use_mrope": True}, "use_mrope"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"attention_bias": False}, "attention_bias"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (LLAMA, {"sliding_window": 4}, "sliding_window"),
        (GPT2, {"activation_function": "relu"}, "activation_function"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"embd_pdrop": 0.2}, "embd_pdrop"),
        (GPT2, {"n_ctx": 16}, "n_ctx"),
        (GPT2, {"n_layer": 0}, "n_layer"),
        (GPT2, {"n_layer": "two"}, "n_layer"),
        (GPT2, {"n_head": None}, "n_head"),
        (GPT2, {"sliding_window": 16, "mystery": 1}, "mystery 1, sliding_window 16"),
        (GPT2, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (GPT2, {"model_type": "opt"}, 'model_type "opt"'),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"mlp_bias": True}, "attention_bias"),
        (LLAMA, {"rope_theta": 10000.5}, "rope_theta"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "beta": 2.0}}, "beta"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling"),
    ],
)
def test_what_cannot_be_said_in_flags_is_refused_by_name(values, changes, named):
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        flags(values, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_means_that_a_key_is_not_used():
    assert flags(LLAMA, sliding_window=None, rope_scaling=None) == flags(LLAMA)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        read(tmp_path)
