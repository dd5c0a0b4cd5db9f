"""Check the flags of mixtures of experts: the model, the layout, and support in each version of
megatron-core.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive, expert_flags
from megatron_npu.pretrain.flags.checks import divides, nothing_without

# (first version of megatron-core, the attribute, the values that it does not have before, what to do there)
_SINCE: tuple[tuple[str, str, object, str], ...] = (
    ("0.13", "moe_router_force_load_balancing", True, "Remove the flag."),
    ("0.14", "moe_router_load_balancing_type", "global_aux_loss", "Pass aux_loss."),
    ("0.14", "moe_router_fusion", True, "Remove the flag."),
    ("0.15", "add_bias_linear", True, "Pass --disable-bias-linear."),
)


def check(args: Namespace) -> None:
    """Check the flags that define the model's experts, and set the derived sizes.

    Raises:
        UsageError: a flag requires --num-experts or another flag, or is not supported by this megatron-core.
    """
    if args.num_experts is None:
        nothing_without("--num-experts", expert_flags.add, args, "Add --num-experts.")
        derive.experts(args)
        return
    derive.experts(args)
    _layers(args)
    _router(args)
    _balance(args)
    _bias(args)
    _versions(args)
    if args.moe_shared_expert_gate and args.moe_shared_expert_intermediate_size is None:
        raise UsageError(
            "--moe-shared-expert-gate requires --moe-shared-expert-intermediate-size",
            remedy="Add --moe-shared-expert-intermediate-size N.",
        )
    if args.moe_token_dispatcher_type == "flex":
        raise UsageError(
            "--moe-token-dispatcher-type must be allgather or alltoall, but got flex, which uses DeepEP "
            "or HybridEP; both are CUDA libraries",
            remedy="Pass alltoall.",
        )


def _layers(args: Namespace) -> None:
    frequency = args.moe_layer_freq
    if isinstance(frequency, list) and len(frequency) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq must describe {args.num_layers} layers (--num-layers), but it describes "
            f"{len(frequency)}",
            remedy="Change one of the two.",
        )
    if not any(derive.expert_layers(args)):
        raise UsageError(
            f"--moe-layer-freq must select at least one layer with experts, but {frequency} selects none",
            remedy="Change this value.",
        )


def _router(args: Namespace) -> None:
    if args.moe_router_topk > args.num_experts:
        raise UsageError(
            f"--moe-router-topk must be at most --num-experts {args.num_experts}, but got "
            f"{args.moe_router_topk}",
            remedy="Lower this value.",
        )
    plain = args.moe_router_score_function == "softmax" and not args.moe_router_pre_softmax
    if args.moe_router_topk == 1 and plain and args.moe_router_load_balancing_type != "sinkhorn":
        raise UsageError(
            "--moe-router-topk 1 requires --moe-router-pre-softmax, which computes the softmax over all "
            "experts; a softmax over the single selected expert is always 1",
            remedy="Add --moe-router-pre-softmax.",
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise UsageError(
            "--moe-router-enable-expert-bias requires --moe-router-score-function sigmoid",
            remedy="Add --moe-router-score-function sigmoid.",
        )
    _groups(args)


def _groups(args: Namespace) -> None:
    groups, taken = args.moe_router_num_groups, args.moe_router_group_topk
    if (groups is None) != (taken is None):
        raise UsageError(
            "--moe-router-num-groups and --moe-router-group-topk must be passed together, but only one of "
            "them was given",
            remedy="Add the other flag.",
        )
    if groups is not None:
        divides(groups, "--moe-router-num-groups", args.num_experts, "--num-experts")
        divides(taken, "--moe-router-group-topk", args.moe_router_topk, "--moe-router-topk")
        if taken > groups:
            raise UsageError(
                f"--moe-router-group-topk must be at most --moe-router-num-groups {groups}, but got {taken}",
                remedy="Lower this value.",
            )


def _balance(args: Namespace) -> None:
    kinds, weights = _list(args.moe_router_load_balancing_type), _list(args.moe_aux_loss_coeff)
    if len(kinds) != len(weights) or len(set(kinds)) != len(kinds):
        raise UsageError(
            "each --moe-router-load-balancing-type must be named once and have one --moe-aux-loss-coeff, "
            f"but got {len(kinds)} types and {len(weights)} weights",
            remedy="Change one of the two flags.",
        )
    for kind, weight in zip(kinds, weights, strict=True):
        if kind in ("sinkhorn", "none") and (weight or len(kinds) > 1):
            raise UsageError(
                f"--moe-router-load-balancing-type {kind} has no balancing loss, so its "
                "--moe-aux-loss-coeff must be 0 and no other type may be named, but got the weight "
                f"{weight:g}",
                remedy="Change one of the two flags.",
            )
    _capacity(args, kinds)


def _capacity(args: Namespace, kinds: list[Any]) -> None:
    if args.moe_expert_capacity_factor is not None and "sinkhorn" in kinds:
        raise UsageError(
            "--moe-expert-capacity-factor cannot be used with --moe-router-load-balancing-type sinkhorn",
            remedy="Remove --moe-expert-capacity-factor.",
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        raise UsageError(
            "--moe-pad-expert-input-to-capacity requires --moe-expert-capacity-factor",
            remedy="Add --moe-expert-capacity-factor.",
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
                f"{flag} requires --disable-bias-linear, because it does not support biases",
                remedy="Add --disable-bias-linear.",
            )


def _versions(args: Namespace) -> None:
    version = tuple(int(part) for part in args.megatron_version.split(".")[:2])
    if version == (0, 16) and args.moe_grouped_gemm and not args.bf16:
        raise UsageError(
            f"--moe-grouped-gemm requires --bf16 with megatron-core {args.megatron_version}, which "
            "supports no other type",
            remedy="Add --bf16.",
        )
    for since, name, value, remedy in _SINCE:
        if value in _list(getattr(args, name)) and version < tuple(map(int, since.split("."))):
            raise UsageError(
                f"{_shown(name, value)} cannot be used with megatron-core {args.megatron_version}, only "
                f"with {since} or later",
                remedy=remedy,
            )
    if version < (0, 14) and isinstance(args.moe_router_load_balancing_type, list):
        raise UsageError(
            "several values of --moe-router-load-balancing-type cannot be used with megatron-core "
            f"{args.megatron_version}, only with 0.14 or later",
            remedy="Pass one.",
        )


def _shown(name: str, value: Any) -> str:
    flag = "expert biases" if name == "add_bias_linear" else f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def layout(args: Namespace) -> None:
    """Check the layout of the experts, after the rest of the layout has been determined.

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
            "--use-cpu-initialization cannot be used with --expert-model-parallel-size, because on the "
            "host all ranks would initialize their experts identically",
            remedy="Remove --use-cpu-initialization.",
        )


def _tensor_parallel(args: Namespace, tensor: int, expert: int) -> None:
    if args.add_bias_linear and tensor > 1:
        raise UsageError(
            f"--expert-tensor-parallel-size must be 1 for experts with biases, but got {tensor}",
            remedy="Pass --disable-bias-linear.",
        )
    if expert == 1 and tensor != args.tensor_model_parallel_size:
        raise UsageError(
            "--expert-tensor-parallel-size must equal --tensor-model-parallel-size without expert "
            "parallelism, because megatron-core does not sum the experts' gradients otherwise, but got "
            f"{tensor} and {args.tensor_model_parallel_size}",
            remedy="Change one of the two, or pass --expert-model-parallel-size.",
        )
    if args.tensor_model_parallel_size > 1 and args.train_iters != 0 and not args.sequence_parallel:
        raise UsageError(
            "experts with --tensor-model-parallel-size require --sequence-parallel, without which "
            "megatron-core does not train experts",
            remedy="Add --sequence-parallel.",
        )


def _divided(args: Namespace, tensor: int, expert: int) -> None:
    """Check that the sizes of the experts are divisible by the number of ranks that share them."""
    divides(expert, "--expert-model-parallel-size", args.num_experts, "--num-experts")
    divides(tensor, "--expert-tensor-parallel-size", args.moe_ffn_hidden_size, "--moe-ffn-hidden-size")
    together = tensor * expert * args.pipeline_model_parallel_size
    divides(
        together,
        "expert-tensor x expert x pipeline parallel sizes",
        args.world_size,
        "the number of processes",
        f"Start a multiple of {together} processes, such as `torchrun --nproc-per-node {together} "
        "-m megatron_npu pretrain …`, or change the sizes.",
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
