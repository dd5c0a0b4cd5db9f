"""config.json: what it means as flags, and that nothing in it is overlooked."""

from __future__ import annotations

import contextlib
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import families
from megatron_npu.conversion.config import Config, read

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


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "linear", "factor": 2.5}, "--rotary-seq-len-interpolation-factor 2.5"),
        ({"type": "linear", "factor": 2.0}, "--rotary-seq-len-interpolation-factor 2"),
        (
            {"type": "dynamic", "factor": 2.0},
            "--rope-scaling-type dynamic --rope-scaling-factor 2.0 "
            "--rope-scaling-original-max-position-embeddings 64",
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
            "--rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 16 --yarn-beta-fast 32.0 "
            "--yarn-beta-slow 1.0 --no-yarn-correction-range-round-to-int",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 1.5, "beta_slow": 2},
            "--yarn-original-max-position-embeddings 64 --yarn-beta-fast 32.0 --yarn-beta-slow 2 "
            "--mscale 0.7 --mscale-all-dim 1.5",
        ),
        ({**LLAMA3, "high_freq_factor": 8}, "--rope-scaling-factor 32.0 --rope-scaling-high-freq-factor 8"),
        (
            {**LLAMA3, "original_max_position_embeddings": None},  # transformers: the longest
            "--rope-scaling-factor 32.0 --rope-scaling-original-max-position-embeddings 64",
        ),
    ],
)
def test_scaled_rotary_embeddings(scaling, said):
    found = flags(LLAMA, rope_scaling=scaling)
    assert f" {said} " in found
    assert ("--use-rope-scaling" in found) == ("--rope-scaling-factor" in found)
    kind = scaling.get("rope_type", scaling.get("type"))
    assert f"--position-embedding-type {'yarn' if kind == 'yarn' else 'rope'} " in found
    assert f"--max-position-embeddings {128 if kind == 'dynamic' else 64} " in found


def test_windows_of_some_layers():
    on = {"use_sliding_window": True, "sliding_window": 7}
    assert "--pre-tockens 6 --window-attn-skip-freq [0,1] " in flags(QWEN2, **on, max_window_layers=1)
    assert "skip-freq" not in flags(QWEN2, **on, max_window_layers=0)
    assert "tockens" not in flags(QWEN2, **on)  # from layer 28 on
    kinds = ["sliding_attention", "full_attention"]
    assert "--window-attn-skip-freq [1,0] " in flags(QWEN3, **on, layer_types=kinds)


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
QWEN2_MOE = {
    **QWEN2,
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def test_one_expert_whose_score_is_always_one_is_refused():
    one = {"num_experts_per_tok": 1}
    for values in ({**MIXTRAL, **one}, {**QWEN2_MOE, **one, "norm_topk_prob": True}):
        with pytest.raises(UsageError, match="num_experts_per_tok must be at least 2"):
            flags(values)
    assert "--moe-router-topk 1 " in flags({**QWEN2_MOE, **one, "norm_topk_prob": False})


def test_what_a_mixtral_lacks_is_its_own():
    assert "--norm-epsilon 1e-05 " in flags(MIXTRAL)
    assert "tockens" not in flags(MIXTRAL)
    assert "--pre-tockens 6 " in flags(MIXTRAL, sliding_window=7)


def test_a_bias_of_the_attention_alone():
    for values in (LLAMA, QWEN3):
        assert "--disable-bias-linear --add-attention-bias" in flags(values, attention_bias=True)
    assert "bias" not in flags(LLAMA, attention_bias=True, mlp_bias=True)


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
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        (QWEN2, {"use_sliding_window": True, "layer_types": ["full_attention", "chunked"]}, "layer_types"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN2, {"use_mrope": True}, "use_mrope"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN2, {"attention_bias": False}, "attention_bias"),
        (QWEN3, {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
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
        (GPT2, {"model_type": "opt"}, 'it is "opt", which cannot be converted'),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"mlp_bias": True}, "attention_bias"),
        (LLAMA, {"rope_theta": 10000.5}, "rope_theta"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 1e9}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "factor"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}}, "attention_f"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 1, "attention_factor": 2}}, "attention_f"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        (LLAMA, {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, "original_max_position"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "beta": 2.0}}, "beta"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling"),
        (LLAMA, {"rope_theta": 10**400}, "rope_theta"),
        (LLAMA, {"hidden_size": 10**400}, "hidden_size"),
        (
            LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 1e308},
            "max_pos",
        ),
    ],
)
def test_what_cannot_be_said_in_flags_is_refused_by_name(values, changes, named):
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        flags(values, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# What is in config.json of published models beside the keys of the model itself.
PUBLISHED = {
    "SmolLM2": {
        "_name_or_path": "somebody/smollm",
        "_model_name_or_path": "somebody/smollm",
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "unk_token_id": 0,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
        "pretraining_tp": 1,
    },
    "Llama 3.2": {
        "_commit_hash": "4e20de36",
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 2,
        "rope_scaling": LLAMA3,
        "rope_theta": 5e5,
    },
    "TinyLlama": {"architectures": ["LlamaForCausalLM"], "pretraining_tp": 1, "torch_dtype": "float32"},
    "of nanotron, for pictures": {"qk_layer_norms": False, "neftune_noise_alpha": 0.0},
    "of transformers 5": {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        "pad_token_id": None,
    },
}
PUBLISHED_GPT2 = {
    "gpt2": {
        "n_ctx": 32,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "distilgpt2": {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "of old transformers": {"is_decoder": False, "pruned_heads": {}, "temperature": 1.0, "num_beams": 1},
}
PUBLISHED_QWEN = {
    "Qwen2.5": {
        "max_window_layers": 24,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    },
}


@pytest.mark.parametrize(
    ("values", "more"),
    [
        *((LLAMA, more) for more in PUBLISHED.values()),
        *((GPT2, more) for more in PUBLISHED_GPT2.values()),
        *((QWEN2, more) for more in PUBLISHED_QWEN.values()),
    ],
    ids=[*PUBLISHED, *PUBLISHED_GPT2, *PUBLISHED_QWEN],
)
def test_what_published_models_have_beside_the_model_is_taken(values, more):
    assert flags(values, **more)


@pytest.mark.parametrize(
    ("key", "value"), [("rope_interleaved", True), ("qk_layer_norms", True), ("pruned_heads", {"0": [1]})]
)
def test_a_key_that_is_harmless_with_one_value_is_refused_with_another(key, value):
    with pytest.raises(UsageError, match=key):
        flags(LLAMA, **{key: value})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {**LLAMA3, "factor": 8.0}},
    ],
    ids=["base", "factor"],
)
def test_rotary_keys_of_old_and_new_transformers_must_agree(rope):
    with pytest.raises(UsageError, match="the same in every place that sets it"):
        flags(LLAMA, **rope)
    same = {"rope_theta": 5e5, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": LLAMA3}
    assert "--rotary-base 500000" in flags(LLAMA, **same)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
KEYS = sorted({*GPT2, *LLAMA, *QWEN3, "layer_types", "rope_theta", "rope_scaling", "rope_parameters"})


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    values=st.sampled_from([GPT2, LLAMA, MISTRAL, QWEN2, QWEN3]),
    changes=st.dictionaries(
        st.sampled_from([*KEYS, "layer_norm_epsilon", "sliding_window", "attn_pdrop"]), ANY, max_size=3
    ),
)
def test_whatever_a_key_holds_there_are_flags_or_one_line(values, changes):
    with contextlib.suppress(UsageError):
        assert "\n" not in flags(values, **changes)


def test_null_means_that_a_key_is_not_used():
    assert flags(LLAMA, sliding_window=None, rope_scaling=None) == flags(LLAMA)


@pytest.mark.parametrize("text", [None, "{", "[]", "[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_a_broken_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        read(tmp_path)
