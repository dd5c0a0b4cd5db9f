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
