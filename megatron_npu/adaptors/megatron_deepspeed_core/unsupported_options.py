"""``megatron.arguments``: what DeepSpeed or the tree refuses with a traceback of every rank, in one line."""

from __future__ import annotations

import argparse

from megatron_npu.adaptors.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared.deepspeed import connect_refusals, refuse_configuration
from megatron_npu.errors import UsageError


def refuse(args: argparse.Namespace) -> None:
    """Refuse options that cannot work.

    Raises:
        UsageError: ``--ds-sequence-parallel-fpdt``; with ``--deepspeed``: what its configuration cannot do.
    """
    if args.ds_sequence_parallel_fpdt:
        raise UsageError(
            "--ds-sequence-parallel-fpdt, whose attention in chunks is flash-attn's for CUDA",
            "--ds-sequence-parallel-size alone",
            "Leave it out.",
        )
    if args.deepspeed:
        remedy = "Add --no-pipeline-parallel for stages 2 and 3, or take stage 1."
        refuse_configuration(args, pipeline=not args.no_pipeline_parallel, remedy=remedy)


connect_refusals(records, refuse)
