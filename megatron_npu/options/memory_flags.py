"""Add flags for offloading tensors from device memory, for Megatron versions that lack these flags."""

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
    """Add ``--reuse-fp32-param``, a flag with the same name as in MindSpeed, to a parser.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        "--reuse-fp32-param",
        action="store_true",
        help=(
            "store only the 16 bits of each fp32 main weight that its bf16 parameter lacks; results are "
            "bitwise identical; implies --use-precision-aware-optimizer"
        ),
    )


def refuse_fp8_states(options: Any) -> None:
    """Reject optimizer states in fp8, which only TransformerEngine supports.

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
                f"{flag} fp8 requires TransformerEngine, which is not installed; without it, only fp32, "
                "bf16 and fp16 are supported",
                remedy=f"Pass {flag} bf16.",
            )


def precision_aware_optimizer(args: argparse.Namespace) -> bool:
    """Return True if the flags request the precision-aware optimizer, explicitly or by --reuse-fp32-param."""
    return args.use_precision_aware_optimizer or args.reuse_fp32_param


def check_precision_aware_optimizer(args: argparse.Namespace) -> None:
    """Reject flags that conflict with the precision-aware optimizer.

    Raises:
        UsageError: a required flag is missing, or flags conflict.
    """
    if not precision_aware_optimizer(args):
        _refuse_types_alone(args)
        return
    flag = "--use-precision-aware-optimizer"
    if args.reuse_fp32_param:
        flag = "--reuse-fp32-param"
        _require_remainders(args)
    if args.optimizer_cpu_offload:
        return
    refuse_fp8_states(args)
    if not args.use_distributed_optimizer:
        raise UsageError(
            f"{flag} requires --use-distributed-optimizer", remedy="Add --use-distributed-optimizer."
        )
    if args.ckpt_format == "torch" and (args.save or args.load):
        raise UsageError(
            f"{flag} cannot be used with --ckpt-format torch, because that format rounds the main weights "
            "when loading",
            remedy="Use --ckpt-format torch_dist.",
        )


def _require_remainders(args: argparse.Namespace) -> None:
    """Reject --reuse-fp32-param unless the parameters are bf16 and have fp32 main weights."""
    if not args.bf16 or str(args.main_params_dtype) not in ("fp32", "torch.float32"):
        raise UsageError(
            "--reuse-fp32-param requires bf16 parameters with fp32 main weights, because it assembles "
            "each main weight from the parameter and the 16 bits that the parameter lacks",
            remedy="Pass --bf16 and --main-params-dtype fp32.",
        )


def _refuse_types_alone(args: argparse.Namespace) -> None:
    """Reject the flags for dtypes of optimizer states unless the precision-aware optimizer, which they
    require, is enabled.
    """
    for name in NARROW:
        value = str(getattr(args, f"{name}_dtype", "fp32"))
        if value not in ("fp32", "torch.float32"):
            raise UsageError(
                f"--{name.replace('_', '-')}-dtype {value} requires --use-precision-aware-optimizer",
                remedy="Add --use-precision-aware-optimizer.",
            )


def refuse_moving_nothing(args: argparse.Namespace) -> None:
    """Reject ``--fine-grained-activation-offloading`` without ``--offload-modules``, and vice versa.

    Raises:
        UsageError: only one of the two flags is given.
    """
    asked = getattr(args, "fine_grained_activation_offloading", False)
    if asked != bool(getattr(args, "offload_modules", None)):
        raise UsageError(
            f"{OFFLOADING} and --offload-modules must be passed together, but only one of them was given",
            remedy="Add the other flag, or remove this one.",
        )


def add_swap_optimizer(add: Callable[..., Any]) -> None:
    """Add ``--swap-optimizer``, a flag with the same name as in MindSpeed, to a parser.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        "--swap-optimizer",
        action="store_true",
        help="keep Adam's moments in host memory, where the NPU updates them; saves 8 bytes of device "
        "memory per parameter with bitwise identical results; NPU only",
    )


def refuse_foreign_adam(adam: object, ours: object) -> None:
    """Reject ``--swap-optimizer`` if Megatron does not use this package's Adam class.

    Raises:
        UsageError: ``adam`` is apex's or TransformerEngine's class.
    """
    if adam is not ours:
        raise UsageError(
            "--swap-optimizer requires this package's Adam, but the Adam from "
            f"{getattr(adam, '__module__', adam)} is used, because apex or TransformerEngine is installed",
            remedy="Remove the flag, or uninstall that package.",
        )


def check_swap_optimizer(args: argparse.Namespace) -> None:
    """Reject ``--swap-optimizer`` unless Adam's moments are fp32 tensors on an NPU.

    Raises:
        UsageError: the device is not an NPU, the optimizer is not Adam, or a flag stores the moments
            elsewhere.
    """
    if not args.swap_optimizer:
        return
    flag, device = "--swap-optimizer", devices.current().name
    if device != "npu":
        raise UsageError(
            f"{flag} requires an Ascend NPU, but the device is {device}; only torch_npu provides host "
            "memory that the device can update",
            remedy="Remove the flag.",
        )
    optimizer = getattr(args, "optimizer", "adam")
    if optimizer != "adam":
        raise UsageError(
            f"{flag} requires --optimizer adam, but got --optimizer {optimizer}",
            remedy="Change one of the two flags.",
        )
    for other, fields in _OTHER_STATES.items():
        if any(getattr(args, field, None) for field in fields):
            raise UsageError(
                f"{flag} cannot be used with {other}; it requires the plain or the distributed optimizer "
                "with fp32 moments",
                remedy="Remove one of the two flags.",
            )


OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
OFFLOADING = "--fine-grained-activation-offloading"
OFFLOADED_OF_EXPERTS = ("expert_fc1", "moe_act")  # Megatron's own, since 0.16
SMALLEST_OFFLOADED = 1024 * 1024  # numbers of a tensor that is worth its way: Megatron's default since 0.16
# What upstream recomputes (a word of --recompute-modules) saves nothing that could be moved.
_RECOMPUTED = {"core_attn": ("core_attn",), "layernorm": ("attn_norm", "mlp_norm")}


def add_activation_offloading(add: Callable[..., Any]) -> None:
    """Add ``--fine-grained-activation-offloading``, a flag of megatron-core 0.16, to the parser of an older
    version.

    Args:
        add: ``add_argument`` of a parser or group.
    """
    add(
        OFFLOADING,
        action="store_true",
        help="offload to host memory the activations that the modules in --offload-modules save for the "
        "backward pass",
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
        metavar="N",
        help="keep tensors with fewer than N elements on the device",
    )


def refuse_offloading_on_the_host() -> None:
    """Reject ``--fine-grained-activation-offloading`` on a device that has no memory of its own.

    Raises:
        UsageError: the device's activations are already in host memory.
    """
    device = devices.current()
    if device.is_host:
        raise UsageError(
            f"{OFFLOADING} requires a device with its own memory, but on the {device.name} device "
            "activations are already in host memory",
            remedy="Remove the flag.",
        )


def check_activation_offloading(args: argparse.Namespace, known: Sequence[str] = OFFLOADED) -> None:
    """Reject ``--fine-grained-activation-offloading`` if it would offload nothing or names unknown modules.

    Args:
        args: the arguments, including those of recomputation.
        known: the modules whose tensors can be offloaded.

    Raises:
        UsageError: the device has no memory of its own, no modules are given, or modules are unknown or
            recomputed.
    """
    if not args.fine_grained_activation_offloading:
        if args.offload_modules:
            raise UsageError(
                f"--offload-modules requires {OFFLOADING}",
                remedy=f"Add {OFFLOADING}, or remove --offload-modules.",
            )
        return
    refuse_offloading_on_the_host()
    _require_modules(args.offload_modules, known)
    _refuse_recomputed(args)


def _require_modules(modules: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in modules if name not in known]
    if not modules:
        raise UsageError(
            f"{OFFLOADING} requires --offload-modules", remedy=f"Name any of {', '.join(known)}."
        )
    if unknown:
        raise UsageError(
            f"--offload-modules includes {', '.join(unknown)}, but supports only {', '.join(known)}",
            remedy="Remove the unsupported modules; expert_fc1 and moe_act of experts require "
            "megatron-core 0.16 or later.",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        raise UsageError(
            "--offload-modules attn_proj requires core_attn as well, because the output of core_attn is "
            "the input of attn_proj and would otherwise stay on the device",
            remedy="Add core_attn.",
        )


def _refuse_recomputed(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full":
        raise UsageError(
            f"{OFFLOADING} and --recompute-granularity full are mutually exclusive",
            remedy="Remove one of the two flags.",
        )
    if args.recompute_granularity == "selective":
        again = getattr(args, "recompute_modules", None) or ["core_attn"]
        for name in (name for word in again for name in _RECOMPUTED.get(word, ())):
            if name not in args.offload_modules:
                continue
            raise UsageError(
                f"--offload-modules includes {name}, which is recomputed; a recomputed module saves no "
                "activations that could be offloaded",
                remedy="Remove the module from one of the two lists.",
            )
