"""Match parameter groups when loading a checkpoint even if their learning rates have changed (since 0.19).

Upstream matches a saved group by everything that a user can set for a group. The checkpoint of a run that
continues with another rate, as ``--override-opt_param-scheduler`` allows, contains no such group.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around

_OPTIMIZER = "megatron.core.optimizer"
_KEYS = "param_group_identifier_keys"
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_PLACE = "_megatron_npu_place"
_found = partial(
    around,
    versions=">=0.19",
    until=NOT_FIXED,
    upstream_bug=True,
    why="a run that resumes with another --lr or --min-lr and --override-opt_param-scheduler raises a "
    "ValueError or KeyError, because parameter groups are looked up by their old rates",
)


@_found(f"{_OPTIMIZER}.optimizer:MegatronOptimizer._filter_and_reorder_param_groups")
def find_groups(
    original: Callable[..., list[dict[str, Any]]],
    current_groups: list[dict[str, Any]],
    state_dict_groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Ignore learning rates when matching groups, if the run and the checkpoint have different learning
    rates.
    """
    with _without_rates(f"{_OPTIMIZER}.optimizer", current_groups, state_dict_groups):
        found = original(current_groups, state_dict_groups)
    forget_places(found)
    return found


@_found(f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer.load_state_dict")
def load_groups(original: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> Any:
    """Load a state in which the learning rates may differ from those of the run."""
    saved = state_dict.get("optimizer", {}).get("param_groups", [])  # none with Megatron's FSDP
    try:
        with _without_rates(f"{_OPTIMIZER}.distrib_optimizer", self.optimizer.param_groups, saved):
            return original(self, state_dict)
    finally:
        forget_places(self.optimizer.param_groups)


@contextlib.contextmanager
def _without_rates(module: str, current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Iterator[None]:
    """Make ``module`` match groups by fewer keys inside the ``with`` block, if matching by all keys fails."""
    holder = importlib.import_module(module)
    keys = getattr(holder, _KEYS)
    fewer = tuple(key for key in keys if key not in _RATES)
    if are_found(keys, current, saved):
        yield
        return
    with by_places(holder, fewer, current, saved):
        yield


@contextlib.contextmanager
def by_places(
    holder: Any, fewer: tuple[str, ...], current: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> Iterator[None]:
    """Match groups by fewer keys inside the ``with`` block, and by position among groups with equal keys.

    Positions are counted among groups that differ only in their rates; these groups are created in the order
    of their overrides, with the flags' own rates first. If the number of saved groups differs, nothing is
    changed.
    """
    if not _are_alike(fewer, current, saved):
        yield
        return
    keys = getattr(holder, _KEYS)
    for groups in (current, saved):
        _note_places(fewer, groups)
    setattr(holder, _KEYS, (*fewer, _PLACE))
    try:
        yield
    finally:
        setattr(holder, _KEYS, keys)
        forget_places(current)
        forget_places(saved)


def are_found(keys: tuple[str, ...], current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> bool:
    """Return True if each of the run's groups has the same values of the given keys as a saved group."""
    return set(_marks(keys, current)) <= set(_marks(keys, saved))


def _are_alike(keys: tuple[str, ...], current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> bool:
    """Return True if the checkpoint contains as many groups of each kind as this run."""
    counts = Counter(_marks(keys, saved))
    return all(counts[mark] == count for mark, count in Counter(_marks(keys, current)).items())


def _note_places(keys: tuple[str, ...], groups: list[dict[str, Any]]) -> None:
    """Store, in each group, the number of preceding groups of the same kind."""
    before: Counter[tuple[Any, ...]] = Counter()
    for group, mark in zip(groups, _marks(keys, groups), strict=True):
        group[_PLACE] = before[mark]
        before[mark] += 1


def forget_places(groups: list[dict[str, Any]]) -> None:
    """Remove the values that ``by_places`` has stored in groups or in copies of groups."""
    for group in groups:
        group.pop(_PLACE, None)


def _marks(keys: tuple[str, ...], groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the values of ``keys`` in each group, in the form that upstream uses for comparisons.

    NeMo adds prefixes to the names.
    """
    return [tuple(group.get(key, group.get(f"pre_{key}")) for key in keys) for group in groups]
