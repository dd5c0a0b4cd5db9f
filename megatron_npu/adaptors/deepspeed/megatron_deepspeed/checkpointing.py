"""Patch ``megatron.checkpointing`` to load checkpoints safely and verify checksums, with or without
DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_checkpoints
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared import resumed_schedule


def _enumerations() -> list[ModuleType]:
    from megatron import enums

    return [enums]


connect_checkpoints(records, _enumerations)


@records.around("megatron.learning_rates:AnnealingLR._check_and_set", why=resumed_schedule.WHY)
def refuse_in_one_line(
    original: Callable[..., float], self: Any, cls_value: float, sd_value: float, name: str
) -> float:
    """Report in one line that a schedule differs from the checkpoint's, with the names of this upstream's
    flags.
    """
    check = resumed_schedule.refuse_in_one_line
    return check(original, self, cls_value, sd_value, name, flags="lr-scheduler")
