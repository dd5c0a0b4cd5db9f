"""Fix learning rates that loading assigns to the wrong parameter groups, and an extra step in Megatron's
FSDP.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import backport
from megatron_npu.adaptors.megatron_core.optimizers import found_groups

_OPTIMIZER = "megatron.core.optimizer"
_KEYS = "param_group_identifier_keys"
# What 0.19 looks at beside: ParamGroupOverride of core/optimizer_param_scheduler.py
_OVERRIDES = ("end_wd", "max_lr", "min_lr", "optimizer", "start_wd")

_groups = partial(
    backport,
    versions=">=0.16,<0.19",
    until="0.19.0, #4705",
    why="parameter groups that differ only in their learning rates (an override, or --decoupled-lr) all get "
    "the rates of the last group when a checkpoint is loaded",
)


@_groups(f"{_OPTIMIZER}.optimizer:MegatronOptimizer._filter_and_reorder_param_groups")
def tell_groups_apart(
    original: Callable[..., list[dict[str, Any]]],
    current_groups: list[dict[str, Any]],
    state_dict_groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Also compare learning rates if parameter groups cannot be told apart otherwise."""
    with _more_keys(f"{_OPTIMIZER}.optimizer", current_groups, state_dict_groups):
        found = original(current_groups, state_dict_groups)
    found_groups.forget_places(found)
    return found


@_groups(f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.load_state_dict")
def load_groups_apart(original: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> Any:
    """While loading, also compare learning rates if parameter groups cannot be told apart otherwise."""
    saved = state_dict.get("optimizer", {}).get("param_groups", [])  # none with Megatron's FSDP
    try:
        with _more_keys(f"{_OPTIMIZER}.distrib_optimizer", self.optimizer.param_groups, saved):
            return original(self, state_dict)
    finally:
        found_groups.forget_places(self.optimizer.param_groups)


@contextlib.contextmanager
def _more_keys(module: str, current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Iterator[None]:
    """Make ``module`` also compare the overrides of parameter groups inside the ``with`` block, if needed to
    match them.

    If they suffice, groups are matched by those keys alone, so that a run may continue with other learning
    rates.
    """
    holder = importlib.import_module(module)
    keys = getattr(holder, _KEYS)
    if len({tuple(group.get(key) for key in keys) for group in current}) == len(current):
        yield
        return
    more = [key for key in _OVERRIDES if all(key in group for group in (*current, *saved))]
    if not found_groups.are_found((*keys, *more), current, saved):  # the run continues with other rates
        with found_groups.by_places(holder, keys, current, saved):
            yield
        return
    setattr(holder, _KEYS, (*keys, *more))
    try:
        yield
    finally:
        setattr(holder, _KEYS, keys)


@backport(
    "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard:fully_shard_optimizer",
    versions=">=0.17,<0.20",
    until="0.20, #5976",
    why="Megatron's FSDP creates the optimizer state with a step on zero gradients, which weight decay "
    "turns into a real step and which is counted: Adam's first updates have the wrong size",
)
def shard_without_a_step(
    original: Callable[..., torch.optim.Optimizer],
    optimizer: torch.optim.Optimizer,
    *args: Any,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Shard the optimizer state without a step, which would change the weights and be counted."""
    names = ("lr", "weight_decay")
    kept = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update({name: value * 0 for name, value in values.items()})  # a tensor stays one
    try:
        original(optimizer, *args, **kwargs)
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)
    for counted in (*optimizer.param_groups, *optimizer.state.values()):
        if "step" in counted:
            counted["step"] = counted["step"] * 0
    return optimizer
