"""Llama 1 to 3 of Hugging Face: grouped queries, halves that are rotated, a gated MLP, RMSNorm."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megatron_npu.conversion.config import Config
from megatron_npu.conversion.refusals import must_be
from megatron_npu.conversion.rules import Heads, Rule, padded, qkv, same, stacked
from megatron_npu.errors import UsageError

MODEL_TYPE = "llama"

# What megatron-core's --use-rope-scaling has built in (0.12 to 0.16); its factor alone is a flag.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FREQUENCIES = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


def flags(config: Config) -> list[str]:
    """Return the driver's flags that mean the same model as ``config.json``.

    Raises:
        UsageError: a key that Megatron has no flag for.
    """
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    positions, groups = config.number("max_position_embeddings"), config.number("num_key_value_heads", heads)
    config.require("hidden_act", "silu")
    config.require("is_encoder_decoder", False)
    config.require("partial_rotary_factor", 1.0)
    biased = config.require("mlp_bias", False, True)
    config.require("attention_bias", biased, absent=False)  # Megatron has one flag for both
    result = {
        "--num-layers": config.number("num_hidden_layers"),
        "--hidden-size": hidden,
        "--num-attention-heads": heads,
        "--num-query-groups": groups,
        "--kv-channels": config.number("head_dim", hidden // heads),
        "--ffn-hidden-size": config.number("intermediate_size"),
        "--seq-length": positions,
        "--max-position-embeddings": positions,
        "--position-embedding-type": "rope",
        "--normalization": "RMSNorm",
        "--norm-epsilon": config.take("rms_norm_eps", 1e-6),
        "--attention-dropout": config.take("attention_dropout", 0.0),
        "--hidden-dropout": 0.0,
        "--init-method-std": config.take("initializer_range", 0.02),
        **_rope_flags(config),
    }
    switches = ["--swiglu", "--group-query-attention"]
    if not biased:
        switches.append("--disable-bias-linear")
    if not config.require("tie_word_embeddings", False, True):
        switches.append("--untie-embeddings-and-output-weights")
    config.finish()
    words = [word for flag, value in result.items() for word in (flag, str(value))] + switches
    return [*words, "--use-rope-scaling"] if "--rope-scaling-factor" in result else words


def _rope_flags(config: Config) -> dict[str, object]:
    """Return the flags of the rotary embedding, from the keys of transformers 5 or of those before."""
    rope, scaling = config.table("rope_parameters"), config.table("rope_scaling")
    base = rope.pop("rope_theta", None) or config.take("rope_theta", 10000.0)
    config.take("rope_theta", base)
    if base != int(base):
        raise config.refusal("rope_theta", base, "a whole number, as --rotary-base is")
    result: dict[str, object] = {"--rotary-base": int(base)}
    scaling |= rope
    kind = scaling.pop("rope_type", None) or scaling.get("type", "default")
    scaling.pop("type", None)
    if kind == "llama3":
        result["--rope-scaling-factor"] = scaling.pop("factor", 8.0)
        expected = _LLAMA3
    elif kind == "default":
        expected = {}
    else:
        raise config.refusal("rope_type", kind, '"default" or "llama3"')
    for key, value in scaling.items():
        if value is not None and value != expected.get(key):
            raise config.refusal(f"rope_scaling {key}", value, f"{expected.get(key, 'no such key')}")
    return result


def config(args: Namespace) -> dict[str, Any]:
    """Return the ``config.json`` of the model that the driver's flags mean, readable by transformers 4 and 5.

    Raises:
        UsageError: a flag that Llama has no key for.
    """
    must_be(args, "--normalization", "RMSNorm")
    must_be(args, "--position-embedding-type", "rope")
    must_be(args, "--swiglu", True)
    must_be(args, "--rotary-percent", 1.0)
    if args.add_qkv_bias and not args.add_bias_linear:
        must_be(args, "--add-qkv-bias", False)
    if args.hidden_size % args.num_attention_heads:
        raise UsageError(
            f"--hidden-size {args.hidden_size} with {args.num_attention_heads} heads",
            "a multiple of the number of heads, which transformers asks of a Llama",
            "Nothing was written.",
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": args.tokenizer_vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups,
        "head_dim": args.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": args.max_position_embeddings,
        "initializer_range": args.init_method_std,
        "rms_norm_eps": args.layernorm_epsilon,
        "rope_theta": float(args.rotary_base),
        "rope_scaling": _scaling(args),
        "attention_bias": args.add_bias_linear,
        "attention_dropout": args.attention_dropout,
        "mlp_bias": args.add_bias_linear,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
    }


def _scaling(args: Namespace) -> dict[str, object] | None:
    if not getattr(args, "use_rope_scaling", False):  # absent in checkpoints older than the flag
        return None
    return {"rope_type": "llama3", "factor": args.rope_scaling_factor, **_LLAMA3}


def rules(args: Namespace) -> Iterator[Rule]:
    """Yield the rules of all tensors."""
    rows = args.tokenizer_vocab_size, args.padded_vocab_size
    yield padded("embedding.word_embeddings.weight", "model.embed_tokens.weight", *rows)
    for number in range(args.num_layers):
        yield from _layer(args, f"decoder.layers.{number}", f"model.layers.{number}")
    yield same("decoder.final_layernorm.weight", "model.norm.weight")
    if args.untie_embeddings_and_output_weights:
        yield padded("output_layer.weight", "lm_head.weight", *rows)


def _layer(args: Namespace, ours: str, theirs: str) -> Iterator[Rule]:
    heads = Heads(
        args.num_attention_heads, args.num_query_groups, args.kv_channels, bool(args.rotary_interleaved)
    )
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    yield same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    yield same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight")
    for kind in ("weight", "bias") if args.add_bias_linear else ("weight",):
        projections = [f"{attention}.{part}_proj.{kind}" for part in "qkv"]
        yield qkv(f"{ours}.self_attention.linear_qkv.{kind}", projections, heads)
        yield same(f"{ours}.self_attention.linear_proj.{kind}", f"{attention}.o_proj.{kind}")
        yield stacked(f"{ours}.mlp.linear_fc1.{kind}", [f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}"])
        yield same(f"{ours}.mlp.linear_fc2.{kind}", f"{mlp}.down_proj.{kind}")


def names(stored: Iterable[str]) -> dict[str, str]:
    """Return stored name -> the name that the rules use: the same."""
    return {name: name for name in stored}


def copies(args: Namespace) -> dict[str, str]:
    """Return tensors that files may hold although they are another one: name -> the other's name."""
    if args.untie_embeddings_and_output_weights:
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}


def is_constant(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is no weight but the rotary frequencies, which follow from config.json."""
    return _FREQUENCIES.fullmatch(name) is not None and tensor.dim() == 1
