"""Patch ``megatron.arguments`` to reject options that DeepSpeed or this checkout does not support."""

from __future__ import annotations

import argparse

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_refusals, refuse_configuration
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.base.errors import UsageError


def refuse(args: argparse.Namespace) -> None:
    """Reject options that DeepSpeed or this checkout does not support.

    Raises:
        UsageError: ``--cpu-optimizer`` or ``--universal-checkpoint`` is given, or ``--deepspeed`` is given
            with a configuration that DeepSpeed does not support.
    """
    if args.cpu_optimizer:
        raise UsageError(
            "--cpu-optimizer is declared but not implemented in this checkout; the optimizer must be on "
            "the device, or be offloaded by DeepSpeed. Remove it; for DeepSpeed, set "
            '"offload_optimizer": {"device": "cpu"} and "zero_force_ds_cpu_optimizer": false in its '
            "configuration."
        )
    if args.universal_checkpoint:
        raise UsageError(
            "--universal-checkpoint is not supported: DeepSpeed 0.19.8 can neither read what this "
            "checkout's ds_to_universal.py writes nor convert this checkout's checkpoints, so a checkpoint "
            "must be loaded in the layout in which it was saved. Load it without the flag; to resume in "
            "another layout, use deepspeedai's Megatron-DeepSpeed."
        )
    if args.deepspeed:
        remedy = "Use stage 1; to shard gradients and weights too, use megatron-npu train --deepspeed-config."
        refuse_configuration(args, pipeline=True, remedy=remedy)


connect_refusals(records, refuse)
