"""Checks of mixture-of-experts flags: model, layout, and support in each version of megatron-core."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive, expert_flags
from megatron_npu.pretrain.flags.checks import divides, nothing_without

# (first version of megatron-core, the attribute, the values that it does not have before, what to do there)
_SINCE: tuple[tuple[str, str, object, str], ...] = (
    ("0.13", "moe_router_force_load_balancing", True, "Remove the flag."),
    ("0.14", "moe_router_load_balancing_type", "global_aux_loss", "Give aux_loss."),
    ("0.14", "moe_router_fusion", True, "Remove the flag."),
    ("0.15", "add_bias_linear", True, "Give --disable-bias-linear."),
)


def check(args: Namespace) -> None:
    """Check the model's expert flags; set derived sizes.

    Raises:
        UsageError: a flag requires --num-experts or another flag, or is not supported by this megatron-core.
    """
    if args.num_experts is None:
        nothing_without("--num-experts", expert_flags.add, args, "a mixture of experts", "Add it.")
        derive.experts(args)
        return
    derive.experts(args)
    _layers(args)
    _router(args)
    _balance(args)
    _bias(args)
    _versions(args)
    if args.moe_shared_expert_gate and args.moe_shared_expert_intermediate_size is None:
        raise UsageError("--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size", "Add it.")
    if args.moe_token_dispatcher_type == "flex":
        raise UsageError(
            "--moe-token-dispatcher-type flex",
            "allgather or alltoall: flex uses DeepEP or HybridEP, which are CUDA libraries",
            "Pass alltoall.",
        )


def _layers(args: Namespace) -> None:
    frequency = args.moe_layer_freq
    if isinstance(frequency, list) and len(frequency) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq of {len(frequency)} layers", f"--num-layers {args.num_layers}", "Change one."
        )
    if not any(derive.expert_layers(args)):
        raise UsageError(f"--moe-layer-freq {frequency}", "at least one layer with experts", "Change it.")


def _router(args: Namespace) -> None:
    if args.moe_router_topk > args.num_experts:
        raise UsageError(
            f"--moe-router-topk {args.moe_router_topk}",
            f"at most --num-experts {args.num_experts}",
            "Lower it.",
        )
    plain = args.moe_router_score_function == "softmax" and not args.moe_router_pre_softmax
    if args.moe_router_topk == 1 and plain and args.moe_router_load_balancing_type != "sinkhorn":
        raise UsageError(
            "--moe-router-topk 1 with a softmax over the selected experts, which is always 1",
            "--moe-router-pre-softmax, a softmax over all experts",
            "Add it.",
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise UsageError(
            "--moe-router-enable-expert-bias",
            "--moe-router-score-function sigmoid with it",
            "Add --moe-router-score-function sigmoid.",
        )
    _groups(args)


def _groups(args: Namespace) -> None:
    groups, taken = args.moe_router_num_groups, args.moe_router_group_topk
    if (groups is None) != (taken is None):
        raise UsageError(
            "only one of --moe-router-num-groups and --moe-router-group-topk",
            "both or neither",
            "Add the other flag.",
        )
    if groups is not None:
        divides(groups, "--moe-router-num-groups", args.num_experts, "--num-experts")
        divides(taken, "--moe-router-group-topk", args.moe_router_topk, "--moe-router-topk")
        if taken > groups:
            raise UsageError(
                f"--moe-router-group-topk {taken}", f"at most --moe-router-num-groups {groups}", "Lower it."
            )


def _balance(args: Namespace) -> None:
    kinds, weights = _list(args.moe_router_load_balancing_type), _list(args.moe_aux_loss_coeff)
    if len(kinds) != len(weights) or len(set(kinds)) != len(kinds):
        raise UsageError(
            f"{len(kinds)} --moe-router-load-balancing-type and {len(weights)} --moe-aux-loss-coeff",
            "one weight for each type, and each type only once",
            "Change one of the two flags.",
        )
    for kind, weight in zip(kinds, weights, strict=True):
        if kind in ("sinkhorn", "none") and (weight or len(kinds) > 1):
            raise UsageError(
                f"--moe-aux-loss-coeff {weight:g} with --moe-router-load-balancing-type {kind}",
                "a type with a balancing loss, or no weight",
                "Change one of the two flags.",
            )
    _capacity(args, kinds)


def _capacity(args: Namespace, kinds: list[Any]) -> None:
    if args.moe_expert_capacity_factor is not None and "sinkhorn" in kinds:
        raise UsageError(
            "--moe-expert-capacity-factor with sinkhorn",
            "another --moe-router-load-balancing-type",
            "Remove it.",
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        raise UsageError(
            "--moe-pad-expert-input-to-capacity",
            "--moe-expert-capacity-factor with it",
            "Add --moe-expert-capacity-factor.",
        )


def _bias(args: Namespace) -> None:
    if not args.add_bias_linear:
        return
    for attribute, flag in (
        ("moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size"),
        ("moe_grouped_gemm", "--moe-grouped-gemm"),
    ):
        if getattr(args, attribute):
            raise UsageError(
                flag, "--disable-bias-linear with it, because it does not support biases", "Add it."
            )


def _versions(args: Namespace) -> None:
    version = tuple(int(part) for part in args.megatron_version.split(".")[:2])
    if version == (0, 16) and args.moe_grouped_gemm and not args.bf16:
        raise UsageError(
            f"--moe-grouped-gemm without --bf16 with megatron-core {args.megatron_version}",
            "bf16, the only supported type",
            "Add --bf16.",
        )
    for since, name, value, remedy in _SINCE:
        if value in _list(getattr(args, name)) and version < tuple(map(int, since.split("."))):
            raise UsageError(
                f"{_shown(name, value)} with megatron-core {args.megatron_version}",
                f"{since} or later",
                remedy,
            )
    if version < (0, 14) and isinstance(args.moe_router_load_balancing_type, list):
        raise UsageError(
            f"several --moe-router-load-balancing-type with megatron-core {args.megatron_version}",
            "0.14 or later",
            "Pass one.",
        )


def _shown(name: str, value: Any) -> str:
    flag = "biases of experts" if name == "add_bias_linear" else f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def layout(args: Namespace) -> None:
    """Check the layout of the experts, after the rest of the layout is known.

    Raises:
        UsageError: a size is not divisible, or megatron-core cannot train the layout.
    """
    derive.expert_layout(args)
    if args.num_experts is None:
        return
    tensor, expert = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    _divided(args, tensor, expert)
    _tensor_parallel(args, tensor, expert)
    if expert > 1 and args.use_cpu_initialization:
        raise UsageError(
            "--use-cpu-initialization with --expert-model-parallel-size",
            "weights initialized on the device: on the host all ranks would initialize their "
            "different experts alike",
            "Remove it.",
        )


def _tensor_parallel(args: Namespace, tensor: int, expert: int) -> None:
    if args.add_bias_linear and tensor > 1:
        raise UsageError(
            f"biases of experts with --expert-tensor-parallel-size {tensor}",
            "1",
            "Pass --disable-bias-linear.",
        )
    if expert == 1 and tensor != args.tensor_model_parallel_size:
        raise UsageError(
            f"--expert-tensor-parallel-size {tensor} with --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} and no --expert-model-parallel-size",
            "equal sizes, or expert parallelism: otherwise megatron-core does not sum the "
            "gradients of experts",
            "Change one.",
        )
    if args.tensor_model_parallel_size > 1 and args.train_iters != 0 and not args.sequence_parallel:
        raise UsageError(
            "experts with --tensor-model-parallel-size, without --sequence-parallel",
            "both flags, which megatron-core requires to train experts",
            "Add --sequence-parallel.",
        )


def _divided(args: Namespace, tensor: int, expert: int) -> None:
    """Check that the expert sizes are divisible by the number of ranks that share them."""
    divides(expert, "--expert-model-parallel-size", args.num_experts, "--num-experts")
    divides(tensor, "--expert-tensor-parallel-size", args.moe_ffn_hidden_size, "--moe-ffn-hidden-size")
    divides(
        tensor * expert * args.pipeline_model_parallel_size,
        "expert-tensor x expert x pipeline parallel sizes",
        args.world_size,
        "the number of processes",
    )
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None:
        divides(
            args.tensor_model_parallel_size,
            "--tensor-model-parallel-size",
            shared,
            "--moe-shared-expert-intermediate-size",
        )


def _list(value: object) -> list:
    return value if isinstance(value, list) else [value]
