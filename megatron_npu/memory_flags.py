"""The flags that move what a step needs out of the device's memory, where Megatron has none of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.errors import UsageError

# Fields of the scripts' and of the driver's arguments, by the flag that asks for them: where moments are not
# fp32 tensors of the device.
_OTHER_STATES = {
    "--optimizer-cpu-offload": ("optimizer_cpu_offload",),
    "--reuse-fp32-param": ("reuse_fp32_param",),
    "--use-precision-aware-optimizer": ("use_precision_aware_optimizer",),
    "FSDP": ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp", "fully_sharded"),
}


def add_swap_optimizer(add: Callable[..., Any]) -> None:
    """Declare ``--swap-optimizer``, the name that users of Ascend know.

    Args:
        add: ``add_argument`` of a parser or a group.
    """
    add(
        "--swap-optimizer",
        action="store_true",
        help="keep Adam's moments in the host's memory, where the NPU updates them: 8 bytes a parameter "
        "less on the device, the same numbers to the bit; NPU only",
    )


def refuse_foreign_adam(adam: object, ours: object) -> None:
    """Refuse ``--swap-optimizer`` where ``adam``, the class that Megatron builds, is not ``ours``.

    Raises:
        UsageError: apex's or TransformerEngine's stands there.
    """
    if adam is not ours:
        raise UsageError(
            f"--swap-optimizer with the Adam of {getattr(adam, '__module__', adam)}",
            "that of megatron_npu, which stands where neither apex nor TransformerEngine is installed",
            "Leave out the flag, or uninstall the package.",
        )


def check_swap_optimizer(args: argparse.Namespace) -> None:
    """Refuse ``--swap-optimizer`` where Adam's moments are not fp32 tensors of an NPU.

    Raises:
        UsageError: of another device, another optimizer, or with a flag that keeps moments elsewhere.
    """
    if not args.swap_optimizer:
        return
    flag, device = "--swap-optimizer", devices.current().name
    if device != "npu":
        raise UsageError(
            f"{flag} on the {device} device", "an Ascend NPU", "Leave it out: only torch_npu has such memory."
        )
    optimizer = getattr(args, "optimizer", "adam")
    if optimizer != "adam":
        raise UsageError(f"{flag} with --optimizer {optimizer}", "--optimizer adam", "Change one of the two.")
    for other, fields in _OTHER_STATES.items():
        if any(getattr(args, field, None) for field in fields):
            raise UsageError(
                f"{flag} with {other}",
                "the plain or the distributed optimizer with fp32 moments",
                "Leave out one of the two.",
            )


OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
OFFLOADING = "--fine-grained-activation-offloading"
SMALLEST_OFFLOADED = 1024 * 1024  # numbers of a tensor that is worth its way: Megatron's default since 0.16
# What upstream recomputes (a word of --recompute-modules) saves nothing that could be moved.
_RECOMPUTED = {"core_attn": ("core_attn",), "layernorm": ("attn_norm", "mlp_norm")}


def add_activation_offloading(add: Callable[..., Any]) -> None:
    """Declare megatron-core 0.16's ``--fine-grained-activation-offloading`` for those that are older.

    Args:
        add: ``add_argument`` of a parser or a group.
    """
    add(
        OFFLOADING,
        action="store_true",
        help="keep what the modules of --offload-modules save for backward in the host's memory meanwhile",
    )
    add(
        "--offload-modules",
        nargs="*",
        default=[],
        metavar="MODULE",
        help=f"of each layer but the last: {', '.join(OFFLOADED)}",
    )
    add(
        "--min-offloaded-tensor-size",
        type=int,
        default=SMALLEST_OFFLOADED,
        metavar="NUMBERS",
        help="smaller tensors stay on the device",
    )


def refuse_offloading_on_the_host() -> None:
    """Refuse ``--fine-grained-activation-offloading`` on a device that is the host.

    Raises:
        UsageError: activations are in the host's memory already.
    """
    device = devices.current()
    if device.is_host:
        raise UsageError(
            f"{OFFLOADING} on the {device.name} device",
            "a device whose memory is not the host's",
            "Leave out the flag: activations are in the host's memory already.",
        )


def check_activation_offloading(args: argparse.Namespace) -> None:
    """Refuse ``--fine-grained-activation-offloading`` where nothing would be moved, or what is not known.

    Raises:
        UsageError: on a device that is the host; modules that are not there, none, or recomputed ones.
    """
    if not args.fine_grained_activation_offloading:
        if args.offload_modules:
            raise UsageError(
                f"--offload-modules without {OFFLOADING}", "both", f"Add {OFFLOADING}, or leave it out."
            )
        return
    refuse_offloading_on_the_host()
    modules = args.offload_modules
    unknown = [name for name in modules if name not in OFFLOADED]
    if unknown or not modules:
        raise UsageError(
            f"{OFFLOADING} with --offload-modules {' '.join(unknown) or 'left out'}",
            f"some of {', '.join(OFFLOADED)}",
            "Experts' expert_fc1 and moe_act are megatron-core's since 0.16." if unknown else "Name some.",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        raise UsageError(
            "--offload-modules attn_proj without core_attn",
            "both: the one's input is the other's output, which core_attn would hold",
            "Add core_attn.",
        )
    if args.recompute_granularity == "full":
        raise UsageError(
            f"{OFFLOADING} with --recompute-granularity full", "one of the two", "Leave one out."
        )
    if args.recompute_granularity == "selective":
        again = getattr(args, "recompute_modules", None) or ["core_attn"]
        for name in (name for word in again for name in _RECOMPUTED.get(word, ()) if name in modules):
            raise UsageError(
                f"--offload-modules {name}, which is recomputed",
                "modules that are not: a recomputed one saves nothing",
                "Leave it out of one of the two.",
            )
