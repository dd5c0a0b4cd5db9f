"""Resume with another schedule of learning rate and weight decay than the checkpoint's.

Training longer is the commonest case: ``--train-iters`` is a part of the schedule. All trees refuse it unless
a flag says which of the two counts, in an assertion below some eight hundred lines of the script's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.base.errors import UsageError

WHY = (
    "a run that goes on with another --train-iters, --lr or decay ends in an assertion without a flag or "
    "a cure in it"
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
    """Report upstream's comparison of schedules in one line, with the flags that decide.

    Args:
        original: upstream's ``_check_and_set``.
        self: the schedule.
        cls_value: of the command line.
        sd_value: of the checkpoint.
        name: upstream's words for it; steps are counted in samples.
        flags: how the names of the two flags end.

    Raises:
        UsageError: they differ, and no flag says which counts.
    """
    try:
        return original(self, cls_value, sd_value, name)
    except AssertionError:
        raise UsageError(
            f"{name} is {cls_value} on the command line and {sd_value} in the checkpoint",
            "the same schedule of learning rate and weight decay",
            f"Pass --override-{flags} to use the command line's schedule (for example to train longer), "
            f"or --use-checkpoint-{flags} to keep the checkpoint's.",
        ) from None
