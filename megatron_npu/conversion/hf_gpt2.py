"""Support Hugging Face's GPT-2, with Conv1D weights, a fused QKV projection, learned positions and
tanh-form GELU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megatron_npu.conversion import unsupported
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.family import POSITIONS, Family
from megatron_npu.conversion.unsupported import must_be
from megatron_npu.conversion.weight_map import (
    Heads,
    WeightMapping,
    direct,
    fused_qkv,
    padded_vocabulary,
    transposed,
)
from megatron_npu.pretrain.flags.frozen_flags import Flags

# The tanh form has three names (they differ in rounding alone); it is what the fused bias and GELU compute.
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_PREFIX = "transformer."


class Gpt2(Family):
    """The GPT-2 family, a single model type without variants."""

    @property
    def traits(self) -> frozenset[str]:
        """Return the traits of GPT-2; see ``Family``."""
        return frozenset({POSITIONS})

    def flags(self, config: Config) -> list[str]:
        """Return the trainer's flags that describe the same model as ``config.json``.

        Raises:
            UsageError: Megatron has no flag for a key.
        """
        hidden, positions = config.number("n_embd"), config.number("n_positions")
        config.require("n_ctx", positions)
        config.require("scale_attn_weights", True)
        config.require("scale_attn_by_inverse_layer_idx", False)
        config.require("add_cross_attention", False)
        config.require("is_encoder_decoder", False)
        # how attention is rounded, not what it is
        config.require("reorder_and_upcast_attn", False, True)
        dropout = config.real("resid_pdrop", 0.1)
        config.require("embd_pdrop", dropout, absent=0.1)  # Megatron has one flag for both
        result = {
            "--num-layers": config.number("n_layer"),
            "--hidden-size": hidden,
            "--num-attention-heads": config.number("n_head"),
            "--ffn-hidden-size": config.number("n_inner", 4 * hidden),
            "--seq-length": positions,
            "--max-position-embeddings": positions,
            "--norm-epsilon": config.real("layer_norm_epsilon", 1e-5),
            "--attention-dropout": config.real("attn_pdrop", 0.1),
            "--hidden-dropout": dropout,
            "--init-method-std": config.real("initializer_range", 0.02),
        }
        switches = []
        if config.require("activation_function", *_TANH, "gelu") == "gelu":
            switches.append("--no-bias-gelu-fusion")
        if not config.require("tie_word_embeddings", True, False):
            switches.append("--untie-embeddings-and-output-weights")
        config.finish()
        return [word for flag, value in result.items() for word in (flag, str(value))] + switches

    def config(self, args: Flags) -> dict[str, Any]:
        """Return the ``config.json`` of the model that the flags describe.

        Raises:
            UsageError: GPT-2 has no key for a flag.
        """
        must_be(args, "--normalization", "LayerNorm")
        must_be(args, "--position-embedding-type", "learned_absolute")
        must_be(args, "--swiglu", False)
        must_be(args, "--qk-layernorm", False)
        must_be(args, "--num-experts", None)
        must_be(args, "--add-attention-bias", False)
        unsupported.no_window(args)
        must_be(
            args, "--disable-bias-linear", True, name="add_bias_linear", shown="without --disable-bias-linear"
        )
        must_be(args, "--num-query-groups", args.num_attention_heads)
        must_be(args, "--kv-channels", args.hidden_size // args.num_attention_heads)
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.MODEL_TYPE,
            "vocab_size": args.tokenizer_vocab_size,
            "n_positions": args.max_position_embeddings,
            "n_embd": args.hidden_size,
            "n_layer": args.num_layers,
            "n_head": args.num_attention_heads,
            "n_inner": args.ffn_hidden_size,
            "activation_function": "gelu_new" if args.bias_gelu_fusion else "gelu",
            "layer_norm_epsilon": args.layernorm_epsilon,
            "attn_pdrop": args.attention_dropout,
            "resid_pdrop": args.hidden_dropout,
            "embd_pdrop": args.hidden_dropout,
            "initializer_range": args.init_method_std,
            "scale_attn_weights": True,
            "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        }

    def weight_map(self, args: Flags) -> Iterator[WeightMapping]:
        """Yield, for every parameter, the mapping between the two formats."""
        heads = Heads(args.num_attention_heads, args.num_attention_heads, args.kv_channels)
        rows = args.tokenizer_vocab_size, args.padded_vocab_size
        yield padded_vocabulary("embedding.word_embeddings.weight", f"{_PREFIX}wte.weight", *rows)
        if args.untie_embeddings_and_output_weights:  # here: it takes the most room while it is worked on
            yield padded_vocabulary("output_layer.weight", "lm_head.weight", *rows)
        yield direct("embedding.position_embeddings.weight", f"{_PREFIX}wpe.weight")
        for number in range(args.num_layers):
            yield from _layer(f"decoder.layers.{number}", f"{_PREFIX}h.{number}", heads)
        yield from _with_bias("decoder.final_layernorm", f"{_PREFIX}ln_f")

    def canonical_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Map the names of tensors in the files to their names in the weight map.

        The files published by OpenAI lack the prefix.
        """
        stored = list(stored)
        if any(name.startswith(_PREFIX) for name in stored):
            return {name: name for name in stored}
        return {name: name if name.startswith("lm_head.") else _PREFIX + name for name in stored}

    def tied_weights(self, args: Flags) -> dict[str, str]:
        """Map the name of each tied tensor to the name of the tensor that it shares."""
        return {} if args.untie_embeddings_and_output_weights else {"lm_head.weight": f"{_PREFIX}wte.weight"}

    def is_buffer(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is a buffer and not a parameter.

        Old files contain the causal mask of each layer.
        """
        if name.endswith(".attn.bias") and tensor.dim() == 4:
            return bool((tensor.bool() == tensor.new_ones(tensor.shape[-2:]).tril().bool()).all())
        return name.endswith(".attn.masked_bias") and tensor.numel() == 1


def _layer(ours: str, theirs: str, heads: Heads) -> Iterator[WeightMapping]:
    yield from _with_bias(f"{ours}.input_layernorm", f"{theirs}.ln_1")
    for kind in ("weight", "bias"):
        yield fused_qkv(f"{ours}.self_attention.linear_qkv.{kind}", f"{theirs}.attn.c_attn.{kind}", heads)
    yield from _linear(f"{ours}.self_attention.linear_proj", f"{theirs}.attn.c_proj")
    yield from _with_bias(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2")
    yield from _linear(f"{ours}.mlp.linear_fc1", f"{theirs}.mlp.c_fc")
    yield from _linear(f"{ours}.mlp.linear_fc2", f"{theirs}.mlp.c_proj")


def _with_bias(ours: str, theirs: str) -> Iterator[WeightMapping]:
    for kind in ("weight", "bias"):
        yield direct(f"{ours}.{kind}", f"{theirs}.{kind}")


def _linear(ours: str, theirs: str) -> Iterator[WeightMapping]:
    yield transposed(f"{ours}.weight", f"{theirs}.weight")
    yield direct(f"{ours}.bias", f"{theirs}.bias")


KINDS = (Gpt2("gpt2"),)
