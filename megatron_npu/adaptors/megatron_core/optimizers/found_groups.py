"""Groups of parameters that loading does not find, since 0.19: their learning rates have changed.

Upstream looks for a saved group by all that a user can set of one. A run that goes on with another rate, as
``--override-opt_param-scheduler`` lets it, has no such group in its checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around

_OPTIMIZER = "megatron.core.optimizer"
_KEYS = "param_group_identifier_keys"
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_found = partial(
    around,
    versions=">=0.19",
    until=NOT_FIXED,
    upstream_bug=True,
    why="a run that goes on with another --lr or --min-lr and --override-opt_param-scheduler ends in a "
    "ValueError or KeyError: groups of parameters are looked for by their old rates",
)


@_found(f"{_OPTIMIZER}.optimizer:MegatronOptimizer._filter_and_reorder_param_groups")
def find_groups(
    original: Callable[..., list[dict[str, Any]]],
    current_groups: list[dict[str, Any]],
    state_dict_groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Do not compare learning rates where groups differ without."""
    with _without_rates(f"{_OPTIMIZER}.optimizer", current_groups, state_dict_groups):
        return original(current_groups, state_dict_groups)


@_found(f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.load_state_dict")
def load_groups(original: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> Any:
    """Do not compare learning rates where groups differ without."""
    saved = state_dict.get("optimizer", {}).get("param_groups", [])  # none with Megatron's FSDP
    with _without_rates(f"{_OPTIMIZER}.distrib_optimizer", self.optimizer.param_groups, saved):
        return original(self, state_dict)


@contextlib.contextmanager
def _without_rates(module: str, current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Iterator[None]:
    """Let ``module`` look for groups by less in the block, where all of it finds none and less is enough."""
    holder = importlib.import_module(module)
    keys = getattr(holder, _KEYS)
    fewer = tuple(key for key in keys if key not in _RATES)
    found = set(_marks(keys, current)) <= set(_marks(keys, saved))
    if found or not all(len(set(_marks(fewer, groups))) == len(groups) for groups in (current, saved)):
        yield
        return
    setattr(holder, _KEYS, fewer)
    try:
        yield
    finally:
        setattr(holder, _KEYS, keys)


def _marks(keys: tuple[str, ...], groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what tells groups apart, as upstream does; NeMo has other names."""
    return [tuple(group.get(key, group.get(f"pre_{key}")) for key in keys) for group in groups]
