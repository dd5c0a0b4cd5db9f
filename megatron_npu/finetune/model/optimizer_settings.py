"""Set the optimizer's settings from the current flags, rather than from the checkpoint, when a run is
resumed.

These settings must be restored after loading, because torch stores them in the parameter groups, which are
loaded together with the moments, and ``LambdaLR`` stores each group's maximum learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

_SETTINGS = ("betas", "eps", "weight_decay", "initial_lr")


@dataclass(frozen=True)
class Settings:
    """The settings of a newly created optimizer and its schedule.

    Attributes:
        groups: the settings of each group.
        rates: the maximum learning rate of each group, or None without a ``LambdaLR``.
    """

    groups: list[dict[str, Any]]
    rates: list[Any] | None

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, schedule: LRScheduler | None) -> Settings:
        """Return the current settings of an optimizer and its schedule.

        Call this before a checkpoint is loaded.
        """
        groups = [
            {name: group[name] for name in _SETTINGS if name in group} for group in optimizer.param_groups
        ]
        return Settings(groups, list(schedule.base_lrs) if isinstance(schedule, LambdaLR) else None)

    def restore(self, optimizer: torch.optim.Optimizer, schedule: LRScheduler | None) -> None:
        """Restore the settings, and compute the learning rate for the schedule's position."""
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        if self.rates is not None and isinstance(schedule, LambdaLR):
            schedule.base_lrs = list(self.rates)
            follow(schedule)


def follow(schedule: LambdaLR) -> None:
    """Recompute the learning rates for the schedule's position.

    The schedule's function may have changed.
    """
    for group, rate, part in zip(
        schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = rate * part(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
