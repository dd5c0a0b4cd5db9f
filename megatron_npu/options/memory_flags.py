"""Flags that move tensors out of device memory, for Megatron versions that lack them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megatron_npu import devices
from megatron_npu.base.errors import UsageError

# Fields of the scripts' and of the driver's arguments, by the flag that asks for them: where moments are not
# fp32 tensors of the device.
_OTHER_STATES = {
    "--optimizer-cpu-offload": ("optimizer_cpu_offload",),
    "--reuse-fp32-param": ("reuse_fp32_param",),
    "--use-precision-aware-optimizer": ("use_precision_aware_optimizer",),
    "FSDP": ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp", "fully_sharded"),
}


# What ``--use-precision-aware-optimizer`` stores, and its types; upstream's fp8 is TransformerEngine's alone.
NARROW = {
    "main_grads": ("fp32", "bf16"),
    "main_params": ("fp32", "fp16"),
    "exp_avg": ("fp32", "fp16", "bf16"),
    "exp_avg_sq": ("fp32", "fp16", "bf16"),
}


def add_reuse_of_weights(add: Callable[..., Any]) -> None:
    """Declare ``--reuse-fp32-param`` under MindSpeed's name.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        "--reuse-fp32-param",
        action="store_true",
        help=(
            "store only the 16 bits of each fp32 main weight that its bf16 parameter lacks (bitwise "
            "identical results); implies --use-precision-aware-optimizer"
        ),
    )


def refuse_fp8_states(options: Any) -> None:
    """Reject fp8 optimizer states, which only TransformerEngine supports.

    Args:
        options: an ``OptimizerConfig`` or parsed arguments, with dtypes or their names.

    Raises:
        UsageError: a moment would be fp8.
    """
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        value = getattr(options, name, None)
        if value == "fp8" or str(value) == "torch.uint8":
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} fp8 without TransformerEngine", "fp32, bf16 or fp16", f"Pass {flag} bf16."
            )


def check_precision_aware_optimizer(args: argparse.Namespace) -> None:
    """Enable the precision-aware optimizer for --reuse-fp32-param; reject flags that conflict with it.

    Raises:
        UsageError: a required flag is missing, or flags conflict.
    """
    flag = "--use-precision-aware-optimizer"
    if args.reuse_fp32_param:
        flag = "--reuse-fp32-param"
        _require_remainders(args)
        args.use_precision_aware_optimizer = True
    if not args.use_precision_aware_optimizer:
        _refuse_types_alone(args)
    if not args.use_precision_aware_optimizer or args.optimizer_cpu_offload:
        return
    refuse_fp8_states(args)
    if not args.use_distributed_optimizer:
        raise UsageError(
            f"{flag} without --use-distributed-optimizer", "both flags", "Add --use-distributed-optimizer."
        )
    if args.ckpt_format == "torch" and (args.save or args.load):
        raise UsageError(
            f"{flag} with --ckpt-format torch",
            "--ckpt-format torch_dist",
            "Use another format: Megatron's torch format rounds the main weights when loading.",
        )


def _require_remainders(args: argparse.Namespace) -> None:
    """Reject --reuse-fp32-param unless bf16 parameters have fp32 main weights."""
    if not args.bf16 or str(args.main_params_dtype) not in ("fp32", "torch.float32"):
        raise UsageError(
            "--reuse-fp32-param without bf16 parameters that have fp32 main weights",
            "--bf16, and no other --main-params-dtype than fp32",
            "Change them: the main weight consists of the parameter and the 16 bits that it lacks.",
        )


def _refuse_types_alone(args: argparse.Namespace) -> None:
    """Reject dtypes of optimizer states that need the precision-aware optimizer if it is off."""
    for name in NARROW:
        value = str(getattr(args, f"{name}_dtype", "fp32"))
        if value not in ("fp32", "torch.float32"):
            raise UsageError(
                f"--{name.replace('_', '-')}-dtype {value} without --use-precision-aware-optimizer",
                "both",
                "Add --use-precision-aware-optimizer.",
            )


def refuse_moving_nothing(args: argparse.Namespace) -> None:
    """Reject ``--fine-grained-activation-offloading`` without ``--offload-modules``, and the reverse.

    Raises:
        UsageError: only one of them is given.
    """
    asked = getattr(args, "fine_grained_activation_offloading", False)
    if asked != bool(getattr(args, "offload_modules", None)):
        raise UsageError(
            f"only one of {OFFLOADING} and --offload-modules",
            "both or neither",
            "Add the other flag, or remove this one.",
        )


def add_swap_optimizer(add: Callable[..., Any]) -> None:
    """Declare ``--swap-optimizer`` under MindSpeed's name.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        "--swap-optimizer",
        action="store_true",
        help="keep Adam's moments in host memory, where the NPU updates them: saves 8 bytes of device "
        "memory per parameter (bitwise identical results); NPU only",
    )


def refuse_foreign_adam(adam: object, ours: object) -> None:
    """Reject ``--swap-optimizer`` if ``adam``, the class that Megatron uses, is not ``ours``.

    Raises:
        UsageError: ``adam`` is apex's or TransformerEngine's class.
    """
    if adam is not ours:
        raise UsageError(
            f"--swap-optimizer with the Adam of {getattr(adam, '__module__', adam)}",
            "this package's Adam, which is used if neither apex nor TransformerEngine is installed",
            "Remove the flag, or uninstall the package.",
        )


def check_swap_optimizer(args: argparse.Namespace) -> None:
    """Reject ``--swap-optimizer`` unless Adam's moments are fp32 tensors on an NPU.

    Raises:
        UsageError: the device is not an NPU, the optimizer is not Adam, or a flag stores moments elsewhere.
    """
    if not args.swap_optimizer:
        return
    flag, device = "--swap-optimizer", devices.current().name
    if device != "npu":
        raise UsageError(
            f"{flag} on the {device} device",
            "an Ascend NPU",
            "Remove the flag: only torch_npu provides such memory.",
        )
    optimizer = getattr(args, "optimizer", "adam")
    if optimizer != "adam":
        raise UsageError(
            f"{flag} with --optimizer {optimizer}", "--optimizer adam", "Change one of the two flags."
        )
    for other, fields in _OTHER_STATES.items():
        if any(getattr(args, field, None) for field in fields):
            raise UsageError(
                f"{flag} with {other}",
                "the plain or the distributed optimizer with fp32 moments",
                "Remove one of the two flags.",
            )


OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
OFFLOADING = "--fine-grained-activation-offloading"
OFFLOADED_OF_EXPERTS = ("expert_fc1", "moe_act")  # Megatron's own, since 0.16
SMALLEST_OFFLOADED = 1024 * 1024  # numbers of a tensor that is worth its way: Megatron's default since 0.16
# What upstream recomputes (a word of --recompute-modules) saves nothing that could be moved.
_RECOMPUTED = {"core_attn": ("core_attn",), "layernorm": ("attn_norm", "mlp_norm")}


def add_activation_offloading(add: Callable[..., Any]) -> None:
    """Declare megatron-core 0.16's ``--fine-grained-activation-offloading`` for older versions.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        OFFLOADING,
        action="store_true",
        help="offload the activations that --offload-modules save for the backward pass to host memory",
    )
    add(
        "--offload-modules",
        nargs="*",
        default=[],
        metavar="MODULE",
        help=f"modules to offload in each layer except the last: {', '.join(OFFLOADED)}",
    )
    add(
        "--min-offloaded-tensor-size",
        type=int,
        default=SMALLEST_OFFLOADED,
        metavar="NUMBERS",
        help="keep tensors with fewer elements on the device",
    )


def refuse_offloading_on_the_host() -> None:
    """Reject ``--fine-grained-activation-offloading`` on a device without its own memory.

    Raises:
        UsageError: the device's activations are already in host memory.
    """
    device = devices.current()
    if device.is_host:
        raise UsageError(
            f"{OFFLOADING} on the {device.name} device",
            "a device with its own memory",
            "Remove the flag: activations are already in host memory.",
        )


def check_activation_offloading(args: argparse.Namespace, known: Sequence[str] = OFFLOADED) -> None:
    """Reject ``--fine-grained-activation-offloading`` if nothing would be offloaded, or for unknown modules.

    Args:
        args: arguments, including those of recomputation.
        known: the modules whose tensors can be offloaded.

    Raises:
        UsageError: the device has no memory of its own, no modules are given, or modules are unknown or
            recomputed.
    """
    if not args.fine_grained_activation_offloading:
        if args.offload_modules:
            raise UsageError(
                f"--offload-modules without {OFFLOADING}",
                "both",
                f"Add {OFFLOADING}, or remove --offload-modules.",
            )
        return
    refuse_offloading_on_the_host()
    _require_modules(args.offload_modules, known)
    _refuse_recomputed(args)


def _require_modules(modules: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in modules if name not in known]
    if unknown or not modules:
        raise UsageError(
            f"{OFFLOADING} with --offload-modules {' '.join(unknown) or 'left out'}",
            f"any of {', '.join(known)}",
            "expert_fc1 and moe_act of experts need megatron-core 0.16 or later."
            if unknown
            else "Name some.",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        raise UsageError(
            "--offload-modules attn_proj without core_attn",
            "both, because the output of core_attn is the input of attn_proj and would stay on the device",
            "Add core_attn.",
        )


def _refuse_recomputed(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full":
        raise UsageError(
            f"{OFFLOADING} with --recompute-granularity full",
            "only one of the two",
            "Remove one of the two flags.",
        )
    if args.recompute_granularity == "selective":
        again = getattr(args, "recompute_modules", None) or ["core_attn"]
        for name in (name for word in again for name in _RECOMPUTED.get(word, ())):
            if name not in args.offload_modules:
                continue
            raise UsageError(
                f"--offload-modules {name}, which is recomputed",
                "modules that are not recomputed, because a recomputed module saves nothing",
                "Remove the module from one of the two lists.",
            )
