"""Check whether the flags request model parallelism, which is supported only for megatron-core models."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError


def is_cut(args: Namespace) -> bool:
    """Return True if the flags request model parallelism."""
    return args.tensor_model_parallel_size * args.pipeline_model_parallel_size > 1


def cannot_be_cut(args: Namespace, what: str) -> UsageError:
    """Return the error that is raised if model parallelism is requested for a model that does not support it.

    Args:
        args: the flags.
        what: description of the model.
    """
    return UsageError(
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size} and --pipeline-model-parallel-size "
        f"{args.pipeline_model_parallel_size} cannot be used with {what}: both must be 1, because each rank "
        "has all layers, or a shard of each weight (--zero-3-...). Use model parallelism only with Megatron "
        "models: `megatron-npu pretrain`, or a PreTrainer."
    )
