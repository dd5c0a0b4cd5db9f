"""Patch ``megatron.arguments`` to reject options that DeepSpeed or this checkout does not support."""

from __future__ import annotations

import argparse

from megatron_npu import devices
from megatron_npu.adaptors.deepspeed.flags_and_runs import (
    connect_refusals,
    read_configuration,
    refuse_configuration,
    zero_stage,
)
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import records
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError


def refuse(args: argparse.Namespace) -> None:
    """Reject options that DeepSpeed or this checkout does not support.

    Raises:
        UsageError: ``--ds-sequence-parallel-fpdt`` is given; ``--ds-sequence-parallel-size`` is given where
            it does not train; rotary embedding is given where upstream's faulty one ends in an error;
            ``--apply-layernorm-1p`` is given without CUDA; or ``--deepspeed`` is given with a configuration
            that DeepSpeed does not support.
    """
    if args.ds_sequence_parallel_fpdt:
        raise UsageError(
            "--ds-sequence-parallel-fpdt is not supported, because its chunked attention requires "
            "flash-attn for CUDA. Remove it, and use --ds-sequence-parallel-size without it."
        )
    if args.apply_layernorm_1p and devices.current().name != "cuda":
        raise UsageError(
            "--apply-layernorm-1p requires CUDA; without CUDA, upstream uses a layer norm that does not "
            "support it. Remove it, and use plain layer norm or --normalization rmsnorm."
        )
    if args.ds_sequence_parallel_size > 1:
        _refuse_sequence_parallel(args)
    if args.use_rotary_position_embeddings and not settings.BACKPORT.enabled():
        _refuse_rotary(args)
    if args.deepspeed:
        remedy = "Add --no-pipeline-parallel for stages 2 and 3, or use stage 1."
        refuse_configuration(args, pipeline=not args.no_pipeline_parallel, remedy=remedy)


def _refuse_sequence_parallel(args: argparse.Namespace) -> None:
    """Reject sequence-parallel runs that would fail, or in which the ranks of a sequence would train
    independently.
    """
    given = f"--ds-sequence-parallel-size {args.ds_sequence_parallel_size}"
    if max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) > 1:
        raise UsageError(
            f"{given} cannot be combined with --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size, because upstream has no process groups for such combinations. "
            "Use only one of the three."
        )
    if not args.deepspeed or not args.no_pipeline_parallel:
        raise UsageError(
            f"{given} requires both --deepspeed and --no-pipeline-parallel, because DeepSpeed's "
            "engine sums the gradients of the sequence-parallel ranks, and only a model without "
            "a pipeline splits the tokens between these ranks. Add both flags."
        )
    config = read_configuration(args.deepspeed_config)
    scatters = (config.get("zero_optimization") or {}).get("reduce_scatter", True)
    if zero_stage(args, config) == 3 and scatters:
        raise UsageError(
            f"{given} cannot be used at ZeRO stage 3, where DeepSpeed averages the gradients of the "
            "sequence-parallel ranks instead of summing them. "
            'Add "reduce_scatter": false to "zero_optimization" in the configuration, or use stage 2.'
        )


def _refuse_rotary(args: argparse.Namespace) -> None:
    """Reject rotary options with which upstream fails, ignores positions, or trains with wrong angles."""
    ranks = args.ds_sequence_parallel_size > 1
    if ranks or (args.deepspeed and not args.no_pipeline_parallel):
        raise UsageError(
            "--use-rotary-position-embeddings cannot be used with "
            + ("--ds-sequence-parallel-size" if ranks else "DeepSpeed's pipeline")
            + ", because upstream's rotary embedding mixes up its two tables. "
            + f"Set {settings.BACKPORT.name}=1 to fix it, or "
            + ("remove --ds-sequence-parallel-size." if ranks else "add --no-pipeline-parallel.")
        )


connect_refusals(records, refuse)
