"""Which family a checkpoint becomes, by what its flags say and by what it was."""

from __future__ import annotations

import itertools
import re
from argparse import Namespace

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import families, hf_llama
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.family import (
    ATTENTION_BIAS,
    EXPERTS,
    POSITIONS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERT,
    SOME_WINDOWS,
    WINDOW,
    Family,
)
from tests.conftest import ROOT

LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "window_attn_skip_freq": None,
    "add_bias_linear": False,
    "add_attention_bias": False,
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


YARN = {
    "rotary_scaling_factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
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
        ({"add_qkv_bias": True, "add_attention_bias": True}, "llama"),
        ({"add_qkv_bias": True, "add_attention_bias": True, "qk_layernorm": True}, "qwen3"),
        ({"add_qkv_bias": True, "pre_tokens": 7}, "qwen2"),
        ({"add_qkv_bias": True, "pre_tokens": 7, "window_attn_skip_freq": [0, 1]}, "qwen2"),
        ({"pre_tokens": 7, "window_attn_skip_freq": 4}, "mistral"),  # every layer has it: there are but two
        ({"position_embedding_type": "yarn"} | YARN, "llama"),
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


OF_EXPERTS = {
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
    assert chosen(**{**OF_EXPERTS, **changes}) == name


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
    args = Namespace(**{**LLAMA, **OF_EXPERTS, **changes})
    with pytest.raises(UsageError) as caught:
        families.FAMILIES[name].config(args)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("frequency", "step", "dense"),
    [(1, 1, []), (2, 1, [1, 3]), ([0, 1, 0, 1], 2, []), ([0, 1, 1, 1], 1, [0])],
)
def test_dense_layers_have_keys(frequency, step, dense):
    changes = {"num_layers": 4, "qk_layernorm": True, "moe_layer_freq": frequency}
    keys = families.FAMILIES["qwen3_moe"].config(Namespace(**{**LLAMA, **OF_EXPERTS, **changes}))
    assert (keys["decoder_sparse_step"], keys["mlp_only_layers"]) == (step, dense)


@pytest.mark.parametrize("window", [{"pre_tokens": 7}, {"window_size": (7, 0)}])
def test_a_window_counts_the_own_token(window):
    args = Namespace(**{**LLAMA, **window})
    assert families.FAMILIES["mistral"].config(args)["sliding_window"] == 8
    for other in ("llama", "gpt2"):
        with pytest.raises(UsageError):
            families.FAMILIES[other].config(args)


def test_two_things_that_no_family_has_together():
    args = Namespace(**{**LLAMA, "qk_layernorm": True, "add_qkv_bias": True})
    with pytest.raises(UsageError, match="--add-qkv-bias"):
        families.of_arguments(args).config(args)


# -- each checkpoint is of one family

GPT2 = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False} | {
    "num_query_groups": 4,
    "add_bias_linear": True,
    "bias_gelu_fusion": True,
    "hidden_dropout": 0.0,
}
CHANGES: dict[str, dict[str, object]] = {
    POSITIONS: GPT2,
    QK_NORM: {"qk_layernorm": True},
    QKV_BIAS: {"add_qkv_bias": True},
    ATTENTION_BIAS: {"add_qkv_bias": True, "add_attention_bias": True},
    WINDOW: {"pre_tokens": 7},
    SOME_WINDOWS: {"pre_tokens": 7, "window_attn_skip_freq": [0, 1]},
    EXPERTS: OF_EXPERTS,
    SHARED_EXPERT: SHARED,
}
# two pairs of traits exclude each other: a checkpoint has one of each at most
SETS = [
    frozenset(chosen)
    for size in range(7)
    for chosen in itertools.combinations(CHANGES, size)
    if not {QKV_BIAS, ATTENTION_BIAS} <= set(chosen) and not {WINDOW, SOME_WINDOWS} <= set(chosen)
]


def with_traits(wanted: frozenset[str]) -> Namespace:
    changes = {name: value for trait in CHANGES if trait in wanted for name, value in CHANGES[trait].items()}
    return Namespace(**{**LLAMA, **changes})


def held_by(args: Namespace) -> set[str]:
    return {name for name, family in families.FAMILIES.items() if families._holds(family, args)}


def check_claims() -> None:
    """Check for every set of traits that one family claims a checkpoint, or that none could hold it."""
    for wanted in SETS:
        args = with_traits(wanted)
        claiming = {name for name, family in families.FAMILIES.items() if family.claims(args)}
        holding = held_by(args)
        if not claiming:
            assert not holding, wanted
            with pytest.raises(UsageError, match="but no supported model has this combination"):
                families.of_arguments(args)
            continue
        (name,) = claiming
        assert name == families.of_arguments(args).MODEL_TYPE
        # a Mistral may be without its window: Megatron's flags of such a model are those of a Llama
        assert holding - ({"mistral"} if name == "llama" else set()) == {name}, wanted


def test_one_family_claims_a_checkpoint_or_none_can_hold_it() -> None:
    check_claims()


def test_no_two_families_have_the_same_traits() -> None:
    own = [(family.traits, family.optional_traits) for family in families.FAMILIES.values()]
    assert len({traits for traits, _ in own}) == len(own) == 8
    listed = (*families.hf_gpt2.KINDS, *hf_llama.KINDS, *families.hf_moe.KINDS)
    assert list(families.FAMILIES.values()) == list(listed)  # no model_type twice


# -- docs/contributing/adding-a-family.md, done

PAGE = (ROOT / "docs" / "contributing" / "adding-a-family.md").read_text(encoding="utf-8")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The row of the page, beside the others."""
    (row,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    scope = {"Kind": hf_llama.Kind}
    exec(f"family = {row}", scope)
    family = scope["family"]
    assert isinstance(family, Family)
    monkeypatch.setitem(families.FAMILIES, family.MODEL_TYPE, family)
    return family


def test_the_worked_family_goes_both_ways(toy: Family, tmp_path) -> None:
    keys = {
        "model_type": "toy",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "head_dim": 8,
    }
    found = Config(dict(keys), tmp_path / "config.json")
    assert families.of_config(found) is toy
    found.number("vocab_size")
    flags = toy.flags(found)
    assert {"--qk-layernorm", "--add-qkv-bias", "--disable-bias-linear"} <= set(flags)
    args = with_traits(frozenset({QK_NORM, QKV_BIAS}))
    assert families.of_arguments(args) is toy
    back = toy.config(args)
    assert {name: back[name] for name in keys} == keys
    assert back["architectures"] == ["ToyForCausalLM"]
    assert held_by(args) == {"toy"}


def test_the_worked_family_takes_nothing_from_another(toy: Family) -> None:
    check_claims()
