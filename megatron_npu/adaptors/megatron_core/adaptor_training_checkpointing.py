"""``megatron.training.checkpointing``: checkpoints that are loaded with another expert parallelism."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap
from megatron_npu.errors import UsageError

logger = logging.getLogger(__name__)


@wrap(
    "megatron.training.checkpointing:_load_base_checkpoint",
    versions=">=0.16",
    why="with another expert parallelism upstream looks for random states and optimizers that the "
    "checkpoint has not: 'Missing key rng_state/shard_…', 'Expected 2 entries in state dict, but got 3'",
)
def with_other_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave random states of other ranks where they are, as upstream does for TP and PP; refuse the rest."""

    @functools.wraps(original)
    def load(load_dir: str, args: argparse.Namespace, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
        result = original(load_dir, args, rank0, *rest, **kwargs)
        saved = result[0].get("args") if rank0 and isinstance(result[0], dict) else None
        if saved is not None and not args.finetune:
            _refuse_other_optimizers(saved, args)
            _leave_other_random_states(saved, args)
        return result

    return load


def _refuse_other_optimizers(saved: argparse.Namespace, args: argparse.Namespace) -> None:
    """Raise UsageError where one side alone has an optimizer of its own for the experts."""
    sizes = [getattr(each, "expert_model_parallel_size", 1) for each in (saved, args)]
    if not args.no_load_optim and (sizes[0] == 1) != (sizes[1] == 1):
        raise UsageError(
            f"a checkpoint of --expert-model-parallel-size {sizes[0]}, loaded with {sizes[1]}",
            "the optimizer's state, which upstream keeps apart for experts that are spread",
            "Add --no-load-optim --no-load-rng: the weights fit.",
        )


def _leave_other_random_states(saved: argparse.Namespace, args: argparse.Namespace) -> None:
    if not args.no_load_rng and _states(saved) != _states(args):
        logger.warning("the checkpoint is of another expert parallelism: its random states are left")
        args.no_load_rng = True


def _states(args: argparse.Namespace) -> int:
    """Return how many random states upstream saves for a model-parallel rank."""
    if getattr(args, "expert_model_parallel_size", 1) == 1:
        return 1
    return args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
