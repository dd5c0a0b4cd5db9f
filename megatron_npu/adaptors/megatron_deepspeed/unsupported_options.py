"""``megatron.arguments``: what DeepSpeed or the tree refuses with a traceback of every rank, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_deepspeed.decorators import around
from megatron_npu.adaptors.shared.deepspeed import refuse_configuration
from megatron_npu.errors import UsageError


@around(
    "megatron.arguments:parse_args",
    why="what DeepSpeed or this tree does not do with these flags is an assertion of every rank, after the "
    "model is built",
)
def parse_and_refuse(original: Callable[..., argparse.Namespace], *args: Any, **kwargs: Any) -> Any:
    """Parse; refuse what would fail later."""
    parsed = original(*args, **kwargs)
    refuse(parsed)
    return parsed


def refuse(args: argparse.Namespace) -> None:
    """Refuse options that cannot work.

    Raises:
        UsageError: ``--cpu-optimizer``; with ``--deepspeed``: what its configuration cannot do.
    """
    if args.cpu_optimizer:
        raise UsageError(
            "--cpu-optimizer, which this tree declares and does not have",
            "an optimizer on the device, or one that DeepSpeed offloads",
            'Leave it out; for DeepSpeed: "offload_optimizer": {"device": "cpu"} and '
            '"zero_force_ds_cpu_optimizer": false in its configuration.',
        )
    if args.deepspeed:
        remedy = "Take stage 1; gradients and weights are sharded by megatron-npu train --deepspeed-config."
        refuse_configuration(args, pipeline=True, remedy=remedy)
