"""Support the mixture-of-experts models that are based on Llama, which are Mixtral, Qwen2-MoE and Qwen3-MoE.

All routers apply a softmax over all experts and select the best k. If the scores of these k experts are
normalized to sum to 1, the result equals a softmax over the k experts, which is Megatron's default.
Otherwise, it corresponds to ``--moe-router-pre-softmax``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion.config import Config
from megatron_npu.conversion.family import EXPERTS, QKV_BIAS, SHARED_EXPERT
from megatron_npu.conversion.hf_llama import Kind
from megatron_npu.conversion.unsupported import must_be
from megatron_npu.conversion.weight_map import WeightMapping, concatenated, direct
from megatron_npu.pretrain.flags.derive import expert_layers
from megatron_npu.pretrain.flags.frozen_flags import Flags

# What changes the logits and has no key, with the only value that can be converted.
_ONLY: tuple[tuple[str, object], ...] = (
    ("--moe-router-score-function", "softmax"),
    ("--moe-router-topk-scaling-factor", None),
    ("--moe-router-num-groups", None),
    ("--moe-router-enable-expert-bias", False),
    ("--moe-expert-capacity-factor", None),
)


@dataclass(frozen=True, kw_only=True)
class MixtureKind(Kind):
    """Description of a model type with experts by the properties that distinguish it from other types.

    Attributes:
        experts_keys: the keys of ``config.json`` that may hold the number of experts, the most common key
            first.
        block: the name of the module that contains the router and the experts of a layer.
        parts: the names of an expert's matrices, in the order gate, up, down.
        dense_layers: whether some layers may be dense and experts have their own intermediate size.
        norm_switch: whether ``norm_topk_prob`` selects normalized scores; otherwise they are always
            normalized.
        shared_expert: whether a gated shared expert processes every token.
        bias_switch: whether ``qkv_bias`` can remove the biases of queries, keys and values.
    """

    experts_keys: tuple[str, ...]
    block: str
    parts: tuple[str, str, str]
    dense_layers: bool = False
    norm_switch: bool = False
    shared_expert: bool = False
    bias_switch: bool = False

    # -- from config.json -----------------------------------------------------------------------------------

    def _mixture_flags(self, config: Config) -> dict[str, object]:
        spellings = [key for key in self.experts_keys if config.has(key)]
        experts = config.number((spellings or list(self.experts_keys))[0])
        for key in spellings[1:]:
            config.require(key, experts)
        config.require("output_router_logits", False, True)  # which adds the loss of balance in training
        config.require("router_jitter_noise", 0.0)
        result: dict[str, object] = {
            "--num-experts": experts,
            "--moe-router-topk": config.number("num_experts_per_tok", self._default_topk()),
            "--moe-aux-loss-coeff": config.real("router_aux_loss_coef", 0.001),
        }
        if self.dense_layers:
            result["--moe-ffn-hidden-size"] = config.number("moe_intermediate_size")
            result |= self._frequency(config)
        if self.shared_expert:
            size = config.number("shared_expert_intermediate_size")
            result["--moe-shared-expert-intermediate-size"] = size
        return result

    def _default_topk(self) -> int | None:
        return 2 if not self.norm_switch else None

    def _frequency(self, config: Config) -> dict[str, object]:
        """Return the value of ``--moe-layer-freq`` if some layers of the model are dense."""
        layers, step = config.number("num_hidden_layers"), config.number("decoder_sparse_step", 1)
        dense = config.items("mlp_only_layers")
        pattern = [int(number not in dense and (number + 1) % step == 0) for number in range(layers)]
        if not any(pattern):
            raise config.refusal(
                "mlp_only_layers", dense, "a list that leaves at least one layer with experts"
            )
        return {} if all(pattern) else {"--moe-layer-freq": str(pattern).replace(" ", "")}

    def _mixture_switches(self, config: Config) -> list[str]:
        switches = ["--moe-shared-expert-gate"] if self.shared_expert else []
        if not self._sums_to_one(config):
            switches.append("--moe-router-pre-softmax")
        return switches

    def _sums_to_one(self, config: Config) -> bool:
        """Return True if the scores of the experts of a token are normalized to sum to 1.

        Raises:
            UsageError: the scores are normalized although each token is routed to a single expert, whose
                score would always be 1.
        """
        whole = not self.norm_switch or config.require("norm_topk_prob", False, True)
        if whole and config.number("num_experts_per_tok", self._default_topk()) == 1:
            raise config.refusal(
                "num_experts_per_tok",
                1,
                "at least 2 if scores are normalized to sum to 1: with a single expert, Megatron uses the "
                "expert's probability, whereas this model uses 1",
            )
        return whole

    def _bias_switches(self, config: Config) -> list[str]:
        if self.bias_switch and not config.require("qkv_bias", True, False):
            return ["--disable-bias-linear"]
        return super()._bias_switches(config)

    # -- to config.json -------------------------------------------------------------------------------------

    @property
    def traits(self) -> frozenset[str]:
        """Return the traits that every model of this type has; see ``Family``."""
        shared = {SHARED_EXPERT} if self.shared_expert else set()
        return super().traits - self.optional_traits | {EXPERTS} | shared

    @property
    def optional_traits(self) -> frozenset[str]:
        """Return the traits that only some models of this type have; see ``Family``."""
        return super().optional_traits | ({QKV_BIAS} if self.bias_switch else set())

    def _check_experts(self, args: Flags) -> None:
        if args.num_experts is None:
            raise UsageError(
                f"the checkpoint has no experts, but a {self.MODEL_TYPE} model requires them. Nothing was "
                "written."
            )
        for flag, value in _ONLY:
            must_be(args, flag, value)
        if args.moe_router_load_balancing_type == "sinkhorn":
            must_be(args, "--moe-router-load-balancing-type", "aux_loss")
        if not self.norm_switch:
            must_be(args, "--moe-router-pre-softmax", False)
        if not self.dense_layers and not all(expert_layers(args)):
            must_be(args, "--moe-layer-freq", 1)
        if self.shared_expert:
            must_be(args, "--moe-shared-expert-gate", True)
        else:
            must_be(args, "--moe-shared-expert-intermediate-size", None)

    def _check_qkv_bias(self, args: Flags) -> None:
        if not self.bias_switch:
            super()._check_qkv_bias(args)

    def _own_keys(self, args: Flags) -> dict[str, Any]:
        keys = super()._own_keys(args) | {
            self.experts_keys[0]: args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "router_aux_loss_coef": _first(args.moe_aux_loss_coeff),
            "output_router_logits": False,
        }
        if self.norm_switch:
            keys["norm_topk_prob"] = not args.moe_router_pre_softmax
        if self.shared_expert:
            keys["shared_expert_intermediate_size"] = args.moe_shared_expert_intermediate_size
        if self.bias_switch:
            keys["qkv_bias"] = args.add_qkv_bias
        if self.dense_layers:
            keys["moe_intermediate_size"] = args.moe_ffn_hidden_size
            keys |= _dense_layers(expert_layers(args))
        else:
            keys["intermediate_size"] = args.moe_ffn_hidden_size
        return keys

    # -- tensors --------------------------------------------------------------------------------------------

    def _mlp(self, args: Flags, number: int, ours: str, theirs: str) -> Iterator[WeightMapping]:
        if not expert_layers(args)[number]:
            yield from super()._mlp(args, number, ours, theirs)
            return
        block = f"{theirs}.{self.block}"
        yield direct(f"{ours}.mlp.router.weight", f"{block}.gate.weight")
        for expert in range(args.num_experts):
            yield from _expert(
                f"{ours}.mlp.experts.local_experts.{expert}", f"{block}.experts.{expert}", self.parts
            )
        if self.shared_expert:
            yield from _expert(f"{ours}.mlp.shared_experts", f"{block}.shared_expert", self.parts)
            yield direct(f"{ours}.mlp.shared_experts.gate_weight", f"{block}.shared_expert_gate.weight")


def _expert(ours: str, theirs: str, parts: tuple[str, str, str]) -> Iterator[WeightMapping]:
    gate, up, down = (f"{theirs}.{part}.weight" for part in parts)
    yield concatenated(f"{ours}.linear_fc1.weight", [gate, up])
    yield direct(f"{ours}.linear_fc2.weight", down)


def _first(value: Any) -> float:
    return value[0] if isinstance(value, list) else value


def _dense_layers(pattern: list[bool]) -> dict[str, object]:
    """Return the keys that specify which layers are dense.

    A regular pattern is expressed as a step.
    """
    step = pattern.index(True) + 1
    if pattern == [(number + 1) % step == 0 for number in range(len(pattern))]:
        return {"decoder_sparse_step": step, "mlp_only_layers": []}
    dense = [number for number, experts in enumerate(pattern) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_QWEN_PARTS = ("gate_proj", "up_proj", "down_proj")

KINDS = (
    MixtureKind(
        "mixtral",
        "MixtralForCausalLM",
        head_dim_is_usual=False,
        rotary_base=1e6,
        norm_epsilon=1e-5,
        window=0,
        experts_keys=("num_local_experts", "num_experts"),
        block="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    ),
    MixtureKind(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        window=4096,
        window_switch=True,
        window_layers="odd",
        head_dim_is_usual=False,
        experts_keys=("num_experts", "num_local_experts"),
        block="mlp",
        parts=_QWEN_PARTS,
        dense_layers=True,
        norm_switch=True,
        shared_expert=True,
        bias_switch=True,
    ),
    MixtureKind(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        attention_bias_key=True,
        window=4096,
        window_switch=True,
        experts_keys=("num_experts", "num_local_experts"),
        block="mlp",
        parts=_QWEN_PARTS,
        dense_layers=True,
        norm_switch=True,
    ),
)
