"""Handle a resumed run whose learning-rate or weight-decay schedule differs from that of the checkpoint.

The most common reason is to train for longer, because ``--train-iters`` is part of the schedule. Unless a
flag selects one of the two schedules, all trees reject this with an assertion that appears after about 800
lines of the script's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.base.errors import UsageError

WHY = (
    "a run that resumes with another --train-iters, --lr or decay fails an assertion that names neither "
    "the flag nor a fix"
)


def refuse_in_one_line(
    original: Callable[..., float],
    self: Any,
    cls_value: float,
    sd_value: float,
    name: str,
    *,
    flags: str = "opt_param-scheduler",
) -> float:
    """Replace upstream's error about different schedules with a short error that names the flags to use.

    Args:
        original: upstream's ``_check_and_set``.
        self: the schedule.
        cls_value: the value from the command line.
        sd_value: the value from the checkpoint.
        name: upstream's name for the value; steps are counted in samples.
        flags: the common suffix of the two flags' names.

    Raises:
        UsageError: the values differ, and no flag selects one of them.
    """
    try:
        return original(self, cls_value, sd_value, name)
    except AssertionError:
        raise UsageError(
            f"{name} is {cls_value} on the command line but {sd_value} in the checkpoint; the learning-rate "
            f"and weight-decay schedules must be the same. Pass --override-{flags} to use the command "
            f"line's schedule (for example to train longer), or --use-checkpoint-{flags} to keep the "
            "checkpoint's."
        ) from None
