"""Support Llama and similar models, with grouped-query attention, RoPE, gated MLPs and RMSNorm.

Each model type is described by a ``Kind``, which specifies the biases that the model has, and whether it has
an attention window or norms for queries and keys. The code is shared by all model types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import unsupported, windows
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.family import (
    ATTENTION_BIAS,
    QK_NORM,
    QKV_BIAS,
    SOME_WINDOWS,
    WINDOW,
    Family,
    traits_of,
)
from megatron_npu.conversion.positions import rotary
from megatron_npu.conversion.unsupported import must_be
from megatron_npu.conversion.weight_map import (
    Heads,
    WeightMapping,
    concatenated,
    direct,
    padded_vocabulary,
    qk_norm,
    qkv,
)
from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.frozen_flags import Flags

_FREQUENCIES = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Kind(Family):
    """Description of a model type by the properties that distinguish it from other types.

    Attributes:
        architecture: the name of the class in transformers.
        mlp_bias_key: whether the key ``mlp_bias`` exists, which adds biases to the MLP.
        attention_bias_key: whether the key ``attention_bias`` exists, which adds biases to the QKV and output
            projections.
        qkv_bias: whether the projections of queries, keys and values always have biases, and no other layer
            has any.
        window: the default of ``sliding_window``; 0 means no window by default, and None means that the
            family does not support windows.
        window_switch: whether ``use_sliding_window`` enables windows.
        window_layers: which layers have the window if ``layer_types`` is absent; see ``windows.Layers``.
        qk_norm: whether each head of queries and keys has an RMSNorm.
        head_dim_is_usual: whether transformers always writes ``head_dim``. If False, it is only written for
            unusual sizes.
        head_size: the default of ``head_dim``. If None, the default is the hidden size divided by the number
            of heads.
        groups_optional: whether ``num_key_value_heads`` may be missing, in which case each query head has its
            own key head.
        whole_heads: whether transformers requires a hidden size that is a multiple of the number of heads.
        rotary_base, norm_epsilon: the defaults of the corresponding keys.
    """

    architecture: str
    mlp_bias_key: bool = False
    attention_bias_key: bool = False
    qkv_bias: bool = False
    window: int | None = None
    window_switch: bool = False
    window_layers: windows.Layers = "all"
    qk_norm: bool = False
    head_dim_is_usual: bool = True
    head_size: int | None = None
    groups_optional: bool = False
    whole_heads: bool = False
    rotary_base: float = 1e4
    norm_epsilon: float = 1e-6

    # -- from config.json -----------------------------------------------------------------------------------

    def flags(self, config: Config) -> list[str]:
        """Return the trainer's flags that describe the same model as ``config.json``.

        Raises:
            UsageError: Megatron has no flag for a key.
        """
        hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
        positions = config.number("max_position_embeddings")
        config.require("hidden_act", "silu")
        config.require("is_encoder_decoder", False)
        result = {
            "--num-layers": config.number("num_hidden_layers"),
            "--hidden-size": hidden,
            "--num-attention-heads": heads,
            "--num-query-groups": config.number(
                "num_key_value_heads", heads if self.groups_optional else None
            ),
            "--kv-channels": config.number("head_dim", self.head_size or hidden // heads),
            "--ffn-hidden-size": config.number("intermediate_size"),
            "--seq-length": positions,
            "--max-position-embeddings": positions,
            "--normalization": "RMSNorm",
            "--norm-epsilon": config.real("rms_norm_eps", self.norm_epsilon),
            "--attention-dropout": config.real("attention_dropout", 0.0),
            "--hidden-dropout": 0.0,
            "--init-method-std": config.real("initializer_range", 0.02),
            **self._window_flags(config),
            **rotary.flags(config, self.rotary_base),
            **self._mixture_flags(config),
        }
        switches = ["--swiglu", "--group-query-attention", *self._bias_switches(config)]
        switches += self._mixture_switches(config)
        if not config.require("tie_word_embeddings", False, True):
            switches.append("--untie-embeddings-and-output-weights")
        if self.qk_norm:
            switches.append("--qk-layernorm")
        if "--rope-scaling-factor" in result:
            switches.append("--use-rope-scaling")
        config.finish()
        words = ([flag] if value is None else [flag, str(value)] for flag, value in result.items())
        return [word for each in words for word in each] + switches

    def _mixture_flags(self, config: Config) -> dict[str, object]:
        """Return those mixture-of-experts flags that take a value."""
        return {}

    def _mixture_switches(self, config: Config) -> list[str]:
        """Return those mixture-of-experts flags that take no value."""
        return []

    def _window_flags(self, config: Config) -> dict[str, object]:
        if self.window_switch:
            config.require("use_mrope", False)  # which Qwen2.5's files name, for its models of pictures
        if self.window is None:
            return {}
        return windows.flags(config, self.window, self.window_switch, self.window_layers)

    def _bias_switches(self, config: Config) -> list[str]:
        if self.qkv_bias:
            return ["--disable-bias-linear", "--add-qkv-bias"]
        everywhere = config.require("mlp_bias", False, *([True] if self.mlp_bias_key else []))
        attention = config.require("attention_bias", False, *([True] if self.attention_bias_key else []))
        if everywhere and not attention:
            raise config.refusal(
                "mlp_bias",
                True,
                "false unless attention_bias is true, because Megatron has no flag for a bias only in the "
                "MLP",
            )
        if everywhere:
            return []
        return ["--disable-bias-linear", *(["--add-attention-bias"] if attention else [])]

    # -- to config.json -------------------------------------------------------------------------------------

    @property
    def traits(self) -> frozenset[str]:
        """Return the traits of every model of this type; see ``Family``.

        A Mistral model without a window is also a valid Llama model.
        """
        always = bool(self.window) and not self.window_switch
        has = {QK_NORM: self.qk_norm, QKV_BIAS: self.qkv_bias, WINDOW: always}
        return frozenset(flag for flag, there in has.items() if there)

    @property
    def optional_traits(self) -> frozenset[str]:
        """Return the traits that only some models of this type have; see ``Family``."""
        may = {
            ATTENTION_BIAS: self.attention_bias_key,
            WINDOW: self.window is not None,
            SOME_WINDOWS: self.window_layers != "all",
        }
        return frozenset(flag for flag, there in may.items() if there)

    def config(self, args: Flags) -> dict[str, Any]:
        """Return the ``config.json``, for transformers 4 and 5, of the model that the flags describe.

        Raises:
            UsageError: the family has no key for a flag.
        """
        self._check(args)
        return {
            "architectures": [self.architecture],
            "model_type": self.MODEL_TYPE,
            "vocab_size": args.tokenizer_vocab_size,
            "hidden_size": args.hidden_size,
            "intermediate_size": args.ffn_hidden_size,
            "num_hidden_layers": args.num_layers,
            "num_attention_heads": args.num_attention_heads,
            "num_key_value_heads": args.num_query_groups,
            "hidden_act": "silu",
            "max_position_embeddings": args.max_position_embeddings,
            "initializer_range": args.init_method_std,
            "rms_norm_eps": args.layernorm_epsilon,
            **rotary.keys(args),
            **self._own_keys(args),
            "attention_dropout": args.attention_dropout,
            "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        }

    def _check(self, args: Flags) -> None:
        must_be(args, "--normalization", "RMSNorm")
        if args.position_embedding_type not in rotary_flags.ROTATED:
            must_be(args, "--position-embedding-type", "rope")
        must_be(args, "--swiglu", True)
        must_be(args, "--rotary-percent", 1.0)
        must_be(args, "--qk-layernorm", self.qk_norm)
        if self.window is None:
            unsupported.no_window(args)
        elif self.window_layers == "all" and SOME_WINDOWS in traits_of(args):
            must_be(args, "--window-attn-skip-freq", None)
        if not self.mlp_bias_key:
            must_be(
                args,
                "--disable-bias-linear",
                False,
                name="add_bias_linear",
                shown="with --disable-bias-linear",
            )
        if not self.attention_bias_key:
            must_be(args, "--add-attention-bias", False)
        self._check_qkv_bias(args)
        self._check_experts(args)
        if self.whole_heads and args.hidden_size % args.num_attention_heads:
            raise UsageError(
                f"--hidden-size must be a multiple of the number of heads ({args.num_attention_heads}), as "
                f"transformers requires for a {self.MODEL_TYPE} model, but got {args.hidden_size}. Nothing "
                "was written."
            )

    def _check_qkv_bias(self, args: Flags) -> None:
        if not args.add_bias_linear and not args.add_attention_bias:  # which have that bias, too
            must_be(args, "--add-qkv-bias", self.qkv_bias)

    def _check_experts(self, args: Flags) -> None:
        must_be(args, "--num-experts", None)

    def _own_keys(self, args: Flags) -> dict[str, Any]:
        """Return those keys of ``config.json`` that only some families have."""
        keys: dict[str, Any] = {}
        usual = args.kv_channels * args.num_attention_heads == args.hidden_size
        if self.head_dim_is_usual or not usual or rotary.needs_head_dim(args):
            keys["head_dim"] = args.kv_channels
        if self.attention_bias_key:
            keys["attention_bias"] = args.add_bias_linear or args.add_attention_bias
        if self.mlp_bias_key:
            keys["mlp_bias"] = args.add_bias_linear
        if self.window is not None:
            keys |= windows.keys(args, self.window_switch, self.window_layers)
        return keys

    # -- tensors --------------------------------------------------------------------------------------------

    def weight_map(self, args: Flags) -> Iterator[WeightMapping]:
        """Yield, for every parameter, the mapping between the two formats."""
        rows = args.tokenizer_vocab_size, args.padded_vocab_size
        yield padded_vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", *rows)
        if args.untie_embeddings_and_output_weights:  # here: it takes the most room while it is worked on
            yield padded_vocabulary("output_layer.weight", "lm_head.weight", *rows)
        for number in range(args.num_layers):
            yield from self._layer(args, number, f"decoder.layers.{number}", f"model.layers.{number}")
        yield direct("decoder.final_layernorm.weight", "model.norm.weight")

    def _layer(self, args: Flags, number: int, ours: str, theirs: str) -> Iterator[WeightMapping]:
        yield direct(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
        yield direct(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight")
        yield from _attention(args, f"{ours}.self_attention", f"{theirs}.self_attn")
        yield from self._mlp(args, number, ours, theirs)

    def _mlp(self, args: Flags, number: int, ours: str, theirs: str) -> Iterator[WeightMapping]:
        """Yield, for every parameter of a layer's MLP, the mapping between the two formats."""
        mlp = f"{theirs}.mlp"
        for kind in _kinds(args.add_bias_linear):
            yield concatenated(
                f"{ours}.mlp.linear_fc1.{kind}", [f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}"]
            )
            yield direct(f"{ours}.mlp.linear_fc2.{kind}", f"{mlp}.down_proj.{kind}")

    @staticmethod
    def canonical_names(stored: Iterable[str]) -> dict[str, str]:
        """Return the names of tensors in the files unchanged, because these are also their names in the
        weight map.
        """
        return {name: name for name in stored}

    @staticmethod
    def tied_weights(args: Flags) -> dict[str, str]:
        """Map the name of each tied tensor to the name of the tensor that it shares."""
        if args.untie_embeddings_and_output_weights:
            return {}
        return {"lm_head.weight": "model.embed_tokens.weight"}

    @staticmethod
    def is_buffer(name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is a buffer and not a parameter.

        config.json determines the rotary frequencies.
        """
        return _FREQUENCIES.fullmatch(name) is not None and tensor.dim() == 1


def _attention(args: Flags, ours: str, theirs: str) -> Iterator[WeightMapping]:
    heads = Heads(
        args.num_attention_heads, args.num_query_groups, args.kv_channels, bool(args.rotary_interleaved)
    )
    for kind in _kinds(args.add_bias_linear or args.add_qkv_bias):
        yield qkv(f"{ours}.linear_qkv.{kind}", [f"{theirs}.{part}_proj.{kind}" for part in "qkv"], heads)
    for kind in _kinds(args.add_bias_linear or args.add_attention_bias):
        yield direct(f"{ours}.linear_proj.{kind}", f"{theirs}.o_proj.{kind}")
    for part in "qk" if args.qk_layernorm else "":
        yield qk_norm(f"{ours}.{part}_layernorm.weight", f"{theirs}.{part}_norm.weight", heads)


def _kinds(biased: bool) -> tuple[str, ...]:
    return ("weight", "bias") if biased else ("weight",)


KINDS = (
    Kind(
        "llama",
        "LlamaForCausalLM",
        mlp_bias_key=True,
        attention_bias_key=True,
        groups_optional=True,
        whole_heads=True,
    ),
    Kind("mistral", "MistralForCausalLM", window=4096),
    Kind(
        "qwen2",
        "Qwen2ForCausalLM",
        qkv_bias=True,
        window=4096,
        window_switch=True,
        window_layers="late",
        head_dim_is_usual=False,
    ),
    Kind(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        attention_bias_key=True,
        window=4096,
        window_switch=True,
        window_layers="late",
        head_size=128,
    ),
)
