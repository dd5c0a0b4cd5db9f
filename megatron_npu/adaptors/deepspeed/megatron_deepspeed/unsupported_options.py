"""``megatron.arguments``: what DeepSpeed or the tree refuses with a traceback of every rank, in one line."""

from __future__ import annotations

import argparse

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_refusals, refuse_configuration
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.base.errors import UsageError


def refuse(args: argparse.Namespace) -> None:
    """Refuse options that cannot work.

    Raises:
        UsageError: ``--cpu-optimizer``; ``--universal-checkpoint``; with ``--deepspeed``: what its
            configuration cannot do.
    """
    if args.cpu_optimizer:
        raise UsageError(
            "--cpu-optimizer, which this tree declares and does not have",
            "an optimizer on the device, or one that DeepSpeed offloads",
            'Leave it out; for DeepSpeed: "offload_optimizer": {"device": "cpu"} and '
            '"zero_force_ds_cpu_optimizer": false in its configuration.',
        )
    if args.universal_checkpoint:
        raise UsageError(
            "--universal-checkpoint, whose files DeepSpeed 0.19.8 does not read as this tree's "
            "ds_to_universal.py writes them, and does not write from what this tree saves",
            "the layout that the checkpoint was saved with",
            "Load that one without the flag; deepspeedai's tree goes on with other layouts.",
        )
    if args.deepspeed:
        remedy = "Take stage 1; gradients and weights are sharded by megatron-npu train --deepspeed-config."
        refuse_configuration(args, pipeline=True, remedy=remedy)


connect_refusals(records, refuse)
