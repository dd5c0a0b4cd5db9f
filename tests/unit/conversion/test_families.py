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
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "softmax_type": "vanilla",
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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"softmax_type": "learnable"}, "--softmax-type"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ],
)
def test_what_no_family_has(changes, named):
    with pytest.raises(UsageError, match=named):
        chosen(**changes)


EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_expert_capacity_factor": None,
    "moe_aux_loss_coeff": 0.0,
}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "mixtral"),
        (SHARED, "qwen2_moe"),
        ({"qk_layernorm": True}, "qwen3_moe"),
    ],
)
def test_experts_say_what_they_are(changes, name):
    assert chosen(**{**EXPERTS, **changes}) == name


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {}, "--num-experts"),
        ("mixtral", {"moe_router_pre_softmax": True}, "--moe-router-pre-softmax"),
        ("mixtral", {"moe_layer_freq": 2}, "--moe-layer-freq"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function"),
        ("mixtral", {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ("mixtral", {"num_experts": None}, "no experts"),
        ("mixtral", SHARED, "--moe-shared-expert-intermediate-size"),
        ("qwen2_moe", SHARED | {"moe_shared_expert_gate": False}, "--moe-shared-expert-gate"),
        ("qwen3_moe", SHARED | {"qk_layernorm": True}, "--moe-shared-expert-intermediate-size"),
    ],
)
def test_experts_that_a_family_does_not_have(name, changes, named):
    args = Namespace(**{**LLAMA, **EXPERTS, **changes})
    with pytest.raises(UsageError) as caught:
        families.FAMILIES[name].config(args)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("frequency", "step", "dense"),
    [(1, 1, []), (2, 1, [1, 3]), ([0, 1, 0, 1], 2, []), ([0, 1, 1, 1], 1, [0])],
)
def test_dense_layers_have_keys(frequency, step, dense):
    changes = {"num_layers": 4, "qk_layernorm": True, "moe_layer_freq": frequency}
    keys = families.FAMILIES["qwen3_moe"].config(Namespace(**{**LLAMA, **EXPERTS, **changes}))
    assert (keys["decoder_sparse_step"], keys["mlp_only_layers"]) == (step, dense)


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
