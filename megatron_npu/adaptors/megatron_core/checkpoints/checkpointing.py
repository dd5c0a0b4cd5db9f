"""Fix the checkpoints of old versions with newer torch, the persistent worker, and changes of expert
parallelism.

Patches ``megatron.core.dist_checkpointing`` and ``megatron.training.checkpointing``.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, replace, wrap
from megatron_npu.adaptors.shared import random, resumed_schedule
from megatron_npu.base.errors import UsageError

logger = logging.getLogger(__name__)

around(
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set",
    why=resumed_schedule.WHY,
)(resumed_schedule.refuse_in_one_line)


@wrap(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
    versions="<0.13",
    upstream_bug=True,
    until="0.13, which passes it",
    why="torch 2.7 gave its private function a sixth argument, the format, which 0.12 does not pass",
)
def write_as_torch_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Write tensors in the serialization format that 0.12 always used."""
    if "serialization_format" not in inspect.signature(original).parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return functools.partial(original, serialization_format=SerializationFormat.TORCH_SAVE)


@wrap(
    "megatron.core.dist_checkpointing.strategies.torch:FileSystemWriter",
    upstream_bug=True,
    until=NOT_FIXED,
    why="remove_sharded_tensors moves the file at a path attribute of torch's writer that newer torch no "
    "longer has",
)
def writer_with_metadata_path(original: Any) -> type:
    """Add the attribute ``metadata_path`` to torch's checkpoint writer.

    Newer torch versions no longer have it, and only this module needs it.
    """
    if hasattr(original, "metadata_path"):
        return original
    return type(original.__name__, (original,), {"metadata_path": property(original._get_metadata_path)})


@replace(
    "megatron.core.dist_checkpointing.serialization:remove_sharded_tensors",
    versions=">=0.17,<0.19",
    upstream_bug=True,
    until="0.19, which looks in the class that loads",
    why="upstream looks for the method in the class that saves, but only the class that loads has it: every "
    "call raises an AttributeError",
)
def remove_sharded_tensors(checkpoint_dir: str, key_prefix: str) -> None:
    """Remove the tensors whose keys begin with ``key_prefix``, with their files, from a checkpoint."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.dist_checkpointing.validation import verify_checkpoint

    verify_checkpoint(checkpoint_dir)
    TorchDistLoadShardedStrategy().remove_sharded_tensors(checkpoint_dir, key_prefix)


@around(
    "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.schedule_async_call",
    devices=WITHOUT_CUDA,
    why=(
        "upstream passes the training's own tensors to another process, which copies them to the host: on"
        " a cpu nothing is copied, and the checkpoint gets the weights of later iterations; on an npu "
        "this needs device memory shared between processes"
    ),
)
def copy_before_handing_over(original: Callable[[Any, Any], None], self: Any, async_req: Any) -> None:
    """Copy the tensors to host memory in this process before the asynchronous save begins.

    Training does not write to the copies.
    """
    if async_req.preload_fn is not None:
        rank, _, *rest = async_req.async_fn_args
        copies = tree_map_only(torch.Tensor, _own, async_req.preload_fn())
        async_req = async_req._replace(async_fn_args=[rank, copies, *rest], preload_fn=None)
    original(self, async_req)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor that has its own memory.

    ``.cpu()`` returns a CPU tensor itself rather than a copy.
    """
    return tensor.detach().clone()


around("megatron.training.checkpointing:_load_base_checkpoint", why=random.OTHER_DEVICE)(
    random.with_own_generators
)


@around(
    "megatron.training.checkpointing:_load_base_checkpoint",
    versions=">=0.16",
    upstream_bug=True,
    until=NOT_FIXED,
    why="with another expert-parallel size upstream looks for random states and optimizers that the "
    "checkpoint does not have: 'Missing key rng_state/shard_…', 'Expected 2 entries in state dict, but "
    "got 3'",
)
def with_other_experts(
    original: Callable[..., Any],
    load_dir: str,
    args: argparse.Namespace,
    rank0: bool = False,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Skip random states that belong to other ranks, as upstream does when TP or PP changes.

    Other optimizer layouts are rejected.
    """
    result = original(load_dir, args, rank0, *rest, **kwargs)
    saved = result[0].get("args") if rank0 and isinstance(result[0], dict) else None
    if saved is not None and not args.finetune:
        _refuse_other_optimizers(saved, args)
        _skip_other_random_states(saved, args)
    return result


def _refuse_other_optimizers(saved: argparse.Namespace, args: argparse.Namespace) -> None:
    """Check that either both the checkpoint and this run have a separate optimizer for experts, or neither
    has one.

    Raises:
        UsageError: only one of them has such an optimizer.
    """
    sizes = [getattr(each, "expert_model_parallel_size", 1) for each in (saved, args)]
    if not args.no_load_optim and (sizes[0] == 1) != (sizes[1] == 1):
        raise UsageError(
            f"the checkpoint was saved with --expert-model-parallel-size {sizes[0]}, but this run uses "
            f"{sizes[1]}; the optimizer state can be loaded only with the same size, because upstream "
            "stores it per expert-parallel layout. Add --no-load-optim --no-load-rng to load only the "
            "weights."
        )


def _skip_other_random_states(saved: argparse.Namespace, args: argparse.Namespace) -> None:
    if not args.no_load_rng and _count_random_states(saved) != _count_random_states(args):
        logger.warning(
            "the checkpoint has a different expert-parallel size, so its random states are not loaded"
        )
        args.no_load_rng = True


def _count_random_states(args: argparse.Namespace) -> int:
    """Return the number of random states that upstream saves for a model-parallel rank."""
    if getattr(args, "expert_model_parallel_size", 1) == 1:
        return 1
    return args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
