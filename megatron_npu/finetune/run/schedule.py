"""Compute the learning rate as Megatron does: warm-up from 0, then decay to a minimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_npu.finetune.run.flag_parts import RateFlags

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


def part(iteration: int, *, warmup: int, decay: int, style: str, least: float) -> float:
    """Return the learning rate of an iteration as a fraction of the maximum learning rate.

    The formulas are those of ``OptimizerParamScheduler.get_lr`` (megatron-core 0.16); with ``least`` 0 and
    ``decay`` the number of iterations, ``linear`` is Transformers' ``get_linear_schedule_with_warmup``.

    Args:
        iteration: number of the iteration, from 0.
        warmup: iterations from 0 to the maximum rate.
        decay: iteration at which the minimum rate is reached.
        style: ``linear``, ``cosine`` or ``constant``.
        least: the minimum rate as a fraction of the maximum.
    """
    if warmup and iteration < warmup:
        return iteration / warmup
    if style == "constant":
        return 1.0
    if iteration >= decay:
        return least
    done = (iteration - warmup) / (decay - warmup)
    left = 1.0 - done if style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    return least + left * (1.0 - least)


def warmup_iterations(flags: RateFlags) -> int:
    """Return the number of warm-up iterations."""
    if flags.lr_warmup_fraction is None:
        return flags.lr_warmup_iters
    return int(flags.lr_warmup_fraction * (flags.lr_decay_iters or flags.train_iters))


def scheduler_fn(flags: RateFlags) -> Callable[[Optimizer], LRScheduler]:
    """Return a function that creates the scheduler selected by the flags for an optimizer.

    Args:
        flags: the flags about the schedule.
    """
    from torch.optim.lr_scheduler import LambdaLR

    warmup, decay = warmup_iterations(flags), flags.lr_decay_iters or flags.train_iters
    least = flags.min_lr / flags.lr if flags.lr else 0.0

    def at(iteration: int) -> float:
        return part(iteration, warmup=warmup, decay=decay, style=flags.lr_decay_style, least=least)

    return lambda optimizer: LambdaLR(optimizer, at)
