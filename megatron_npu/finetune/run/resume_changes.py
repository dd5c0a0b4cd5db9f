"""Describe how a fine-tuning run differs from the checkpoint from which it resumes.

The table is used by the log, by docs/reference/resume.md and by the tests. Changes that are rejected are
reported by ``checkpoint.load``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from megatron_npu.base.errors import printable
from megatron_npu.finetune.model.prepare import Prepared

_RATES = "applies from the next update on, at the run's position in the schedule"
_NEXT = "applies from the next update on"
_END = "changes the end of the run, and without --lr-decay-iters also that of the schedule"
_OF_OPTIMIZER = (
    "has no effect, because your script creates the optimizer, whose settings come from the checkpoint"
)
_OF_SCHEDULE = "has no effect, because your script creates the schedule, whose rates come from the checkpoint"
_READ_BY_SCRIPT = "has an effect only if the schedule that your script creates reads it"


@dataclass(frozen=True)
class Flag:
    """A flag whose value may change when a run is resumed.

    Attributes:
        name: the attribute that holds the flag's value.
        effect: the effect of changing the value, if no script creates an optimizer or a schedule.
    """

    name: str
    effect: str

    @property
    def flag(self) -> str:
        """The name of the flag on the command line."""
        return f"--{self.name.replace('_', '-')}"


RATE = Flag("lr", _RATES)
SCHEDULE = tuple(
    Flag(name, _RATES)
    for name in ("min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction")
)
OPTIMIZER = tuple(Flag(name, _NEXT) for name in ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps"))
OTHERS = (
    Flag("clip_grad", _NEXT),
    Flag("epochs", _END),
    Flag("train_iters", _END),
    Flag("micro_batch_size", "changes memory and speed; results differ in their last digits"),
    Flag(
        "mixed_precision",
        "uses other matrix products from the next iteration on; fp16 starts with its initial loss scale if "
        "the checkpoint has none",
    ),
    Flag("seq_length", "splits samples at other positions"),
)
FLAGS = (RATE, *SCHEDULE, *OPTIMIZER, *OTHERS)


def since(flags: Mapping[str, Any], saved: Mapping[str, Any], place: object, prepared: Prepared) -> list[str]:
    """Return one log line for each difference from the checkpoint, or an empty list.

    Args:
        flags: the flags of this run.
        saved: the flags of the run that saved the checkpoint.
        place: the checkpoint.
        prepared: the prepared model, whose optimizer and schedule determine the effects of the flags.
    """
    lines = [
        printable(f"  {row.flag} {flags[row.name]} (the checkpoint: {saved[row.name]}): {effect}")
        for row, effect in _effects(prepared)
        if row.name in saved and row.name in flags and saved[row.name] != _plain(flags[row.name])
    ]
    return [f"changed since the checkpoint {place}:", *lines] if lines else []


def _effects(prepared: Prepared) -> Iterator[tuple[Flag, str]]:
    """Yield each flag together with its effect on this optimizer and this schedule."""
    yield RATE, _effect_of_rate(prepared)
    for row in SCHEDULE:
        yield row, row.effect if prepared.flags_schedule else _READ_BY_SCRIPT
    for row in OPTIMIZER:
        yield row, row.effect if prepared.own_optimizer else _OF_OPTIMIZER
    for row in OTHERS:
        yield row, row.effect


def _effect_of_rate(prepared: Prepared) -> str:
    if not prepared.own_optimizer:
        return _OF_OPTIMIZER
    return RATE.effect if isinstance(prepared.lr_scheduler, LambdaLR) else _OF_SCHEDULE


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
