"""Patch ``megatron.training.arguments`` to add fused-attention flags, and to check arguments before
upstream does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import around, fused_optimizer_present
from megatron_npu.adaptors.megatron_core.layers import activation_offloading
from megatron_npu.adaptors.megatron_core.options import refused_options
from megatron_npu.adaptors.megatron_core.options.argument_checks import CHECKS
from megatron_npu.adaptors.shared.arguments import add_attention_flags, declaring
from megatron_npu.options import hccl_buffers, memory_flags, older_flags
from megatron_npu.patching.patch import ALL_DEVICES


def _reasons() -> str:
    """Return the reasons from all checks as one string.

    Each reason follows the name of its check.
    """
    return "; ".join(f"{check.name}{_for(check.devices)}: {check.why}" for check in CHECKS)


def _until() -> str:
    return "; ".join(f"{check.name}: {check.until}" for check in CHECKS if check.until)


def _for(names: tuple[str, ...]) -> str:
    return "" if names == ALL_DEVICES else f" ({'/'.join(names)})"


around(
    "megatron.training.arguments:add_megatron_arguments",
    why="--pre-tockens, --next-tockens and --shape-order of the fused attention",
)(add_attention_flags)


@around(
    "megatron.training.arguments:add_megatron_arguments",
    why="flags from older versions of Megatron, such as --data-impl mmap, which documents still use",
)
def add_older_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add the flags of older Megatron versions after upstream's own flags."""
    parser = original(parser)
    older_flags.add(parser)
    return parser


@around(
    "megatron.training.arguments:add_megatron_arguments",
    why="--cross-entropy-fusion-impl linear, which no release has",
)
def add_linear_loss(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add the value ``linear`` to those that upstream's loss-fusion flag accepts."""
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "cross_entropy_fusion_impl":
            action.choices = [*(action.choices or ()), "linear"]
    return parser


around(
    "megatron.training.arguments:add_megatron_arguments",
    condition=fused_optimizer_present,
    why="--reuse-fp32-param, the flag that Ascend users know for main weights without a second copy",
)(declaring(memory_flags.add_reuse_of_weights))

around(
    "megatron.training.arguments:add_megatron_arguments",
    condition=fused_optimizer_present,
    why="--swap-optimizer, the flag that Ascend users know for moments in host memory",
)(declaring(memory_flags.add_swap_optimizer))

around(
    "megatron.training.arguments:add_megatron_arguments",
    why="--hccl-group-buffer-adaptive, the flag that Ascend users know for per-group HCCL buffers",
)(declaring(hccl_buffers.add))


@around("megatron.training.arguments:validate_args", why=_reasons(), until=_until())
def validate_args(
    original: Callable[..., argparse.Namespace], args: argparse.Namespace, *rest: Any, **kwargs: Any
) -> argparse.Namespace:
    """Run the checks for this device, and then upstream's own checks."""
    device = devices.current().name
    for check in CHECKS:
        if device in check.devices and not (check.condition and check.condition()):
            check.run(args)
    with activation_offloading.unseen_by_upstream(args), refused_options.in_one_line():
        return original(args, *rest, **kwargs)
