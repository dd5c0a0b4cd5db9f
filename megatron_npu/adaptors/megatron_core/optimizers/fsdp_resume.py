"""Support resuming a run with torch's FSDP2 (``--use-torch-fsdp2``), in both checkpoint formats.

Patches ``core.optimizer.optimizer`` and ``training.checkpointing`` of ``megatron``.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around

_COUNT = "step"
_resume = partial(
    around,
    upstream_bug=True,
    until=NOT_FIXED,
    why="after a resume with torch's FSDP2, Adam's step count restarts at zero, so that its first updates "
    "are too large: with --ckpt-format torch_dist upstream skips load_state_dict, because the shards were "
    "read in place, but the settings of the parameter groups were not",
)


@dataclass
class _Load:
    """A call of ``load_checkpoint`` in progress, with the optimizer state that it has read."""

    optimizer_state: Any = None


_LOAD: ContextVar[_Load | None] = ContextVar("the load that is under way", default=None)


@around(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.state_dict",
    upstream_bug=True,
    until=NOT_FIXED,
    why="a checkpoint in the format torch_dcp cannot be loaded: load_checkpoint passes is_loading, which "
    "ChainedOptimizer does not accept (TypeError), although it holds every optimizer",
)
def accept_is_loading(original: Callable[[Any], Any], self: Any, is_loading: bool = False) -> Any:
    """Create the optimizer state before loading, as the 16-bit optimizers do with ``is_loading``."""
    if is_loading:
        for each in self.chained_optimizers:
            each.init_state_fn(each.optimizer, each.config)
            for group in each.optimizer.param_groups:
                group.setdefault(_COUNT, 0)  # torch reads only keys that exist
    return original(self)


@_resume("megatron.training.checkpointing:_load_base_checkpoint", order=2)
def keep_the_state(
    original: Callable[..., Any],
    load_dir: str,
    args: argparse.Namespace,
    rank0: bool = False,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Keep the optimizer state from the checkpoint if it is to be loaded."""
    result = original(load_dir, args, rank0, *rest, **kwargs)
    load = _LOAD.get()
    if load is not None and not rank0:
        wanted = isinstance(result[0], dict) and not (args.finetune or args.no_load_optim)
        load.optimizer_state = result[0].get("optimizer") if wanted else None
    return result


@_resume("megatron.training.checkpointing:load_checkpoint", order=1)
def restore_the_step_count(
    original: Callable[..., Any], ddp_model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Restore the step count of each parameter group from the checkpoint if upstream skips
    ``load_state_dict``.
    """
    given = inspect.signature(original).bind(ddp_model, optimizer, *rest, **kwargs).arguments
    load = _Load()
    token = _LOAD.set(load)
    try:
        result = original(ddp_model, optimizer, *rest, **kwargs)
    finally:
        _LOAD.reset(token)
    if given.get("skip_load_to_model_and_opt") and load.optimizer_state is not None:
        for each, state in _pairs(optimizer, load.optimizer_state):
            ours = each.optimizer.param_groups
            in_our_order = getattr(each, "_filter_and_reorder_param_groups", _as_saved)  # since 0.16
            for group, found in zip(ours, in_our_order(ours, state), strict=True):
                if _COUNT in found:
                    group[_COUNT] = found[_COUNT]
    return result


def _as_saved(ours: list[dict[str, Any]], state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return state


def _pairs(optimizer: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each optimizer of a chained optimizer together with its groups in the checkpoint."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, each in enumerate(chain):
        own = state if len(chain) == 1 else state[number]
        yield each, own.get("optimizer", own)["param_groups"]
