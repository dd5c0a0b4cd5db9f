"""Patch ``megatron.core.optimizer_param_scheduler`` so that loading the optimizer does not undo the user's
overrides.

Parameter groups contain their maximum and minimum learning rates, and a checkpoint restores these. The
schedule reads them first and uses its own values only for groups that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, backport

_SCHEDULE = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_GIVEN = "_megatron_npu_given"  # the rates of the flags, by the number of the group
_overridden = partial(
    backport,
    until=NOT_FIXED,
    why="--override-opt_param-scheduler with another --lr or --min-lr still uses the rates of the run that "
    "saved the checkpoint, because the loaded optimizer's groups take precedence",
)


@_overridden(f"{_SCHEDULE}.__init__")
def remember_rates(
    original: Callable[..., None], self: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    """Store the learning rates of the parameter groups before a checkpoint overwrites them."""
    original(self, optimizer, *args, **kwargs)
    groups = getattr(optimizer, "param_groups", None) or []
    given = [{name: group[name] for name in _RATES if name in group} for group in groups]
    setattr(self, _GIVEN, given)


@_overridden(f"{_SCHEDULE}.load_state_dict")
def override_rates(original: Callable[..., None], self: Any, state_dict: dict[str, Any]) -> None:
    """Restore the learning rates of the parameter groups from the flags if the user requests an override."""
    given, groups = getattr(self, _GIVEN, []), self.optimizer.param_groups
    if self.override_opt_param_scheduler and len(given) == len(groups):
        for group, rates in zip(groups, given, strict=True):
            group.update(rates)
    original(self, state_dict)
