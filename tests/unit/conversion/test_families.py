"""Which family a checkpoint becomes, by what its flags say and by what it was."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu.conversion import families
from megatron_npu.errors import UsageError

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "layernorm_zero_centered_gamma": False,
    "pre_tokens": None,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "tokenizer_vocab_size": 100,
    "init_method_std": 0.02,
    "layernorm_epsilon": 1e-5,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "num_experts": None,
}


def chosen(before: str | None = None, **changes: object) -> str:
    return families.of_arguments(Namespace(**{**LLAMA, **changes}), before).MODEL_TYPE


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "llama"),
        ({"add_bias_linear": True}, "llama"),
        ({"add_bias_linear": True, "add_qkv_bias": True}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"pre_tokens": 7}, "mistral"),
        ({"pre_tokens": 63}, "llama"),  # reaches every token
        ({"window_size": (7, 0)}, "mistral"),
        ({"window_size": (-1, 0)}, "llama"),
        ({"position_embedding_type": "learned_absolute"}, "gpt2"),
    ],
)
def test_a_checkpoint_says_what_it_is(changes, name):
    assert chosen(**changes) == name


@pytest.mark.parametrize(
    ("before", "changes", "name"),
    [
        ("mistral", {}, "mistral"),
        ("mistral", {"add_bias_linear": True}, "llama"),
        ("llama", {"pre_tokens": 7}, "mistral"),
        ("gpt2", {}, "llama"),
        ("bloom", {}, "llama"),
    ],
)
def test_what_it_was_decides_where_it_can(before, changes, name):
    assert chosen(before, **changes) == name


@pytest.mark.parametrize("window", [{"pre_tokens": 7}, {"window_size": (7, 0)}])
def test_a_window_counts_the_own_token(window):
    args = Namespace(**{**LLAMA, **window})
    assert families.FAMILIES["mistral"].config(args)["sliding_window"] == 8
    for other in ("llama", "qwen2", "gpt2"):
        with pytest.raises(UsageError):
            families.FAMILIES[other].config(args)


def test_two_things_that_no_family_has_together():
    args = Namespace(**{**LLAMA, "qk_layernorm": True, "add_qkv_bias": True})
    with pytest.raises(UsageError, match="--add-qkv-bias"):
        families.of_arguments(args).config(args)
