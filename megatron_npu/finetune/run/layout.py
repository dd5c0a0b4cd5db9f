"""Check whether the flags request model parallelism, which only megatron-core models support."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError


def is_cut(args: Namespace) -> bool:
    """Return whether they do."""
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size > 1


def cannot_be_cut(args: Namespace, what: str) -> UsageError:
    """Return what to say where the flags cut something else.

    Args:
        args: the flags.
        what: it, in words.
    """
    return UsageError(
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size} and --pipeline-model-parallel-size "
        f"{args.pipeline_model_parallel_size} with {what}",
        "1 for both: with these switches each rank has all layers, or a shard of each weight (--zero-3-...)",
        "Model parallelism is for Megatron models: those of `megatron-npu pretrain`, or of a PreTrainer.",
    )
