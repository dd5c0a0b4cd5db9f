"""Settings of optimizer and schedule on resume: those of the current flags, not the checkpoint's.

An optimizer's groups of parameters are saved with their settings (betas, epsilon, highest and least learning
rate), and torch loads them with its moments. Upstream's schedule then asks the groups first, so that even
``--override-opt_param-scheduler`` would follow the old run's rates.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from megatron_npu.base.errors import UsageError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_STATE = frozenset({"params", "step"})  # which training changes: never a flag's
_OF_THE_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd"})

Settings = list[dict[str, Any]]


def of_flags(optimizer: MegatronOptimizer) -> Settings:
    """Return the settings of each group of an optimizer that nothing has been loaded into yet."""
    return [
        {name: value for name, value in group.items() if name not in _STATE}
        for group in optimizer.param_groups
    ]


def restore(args: Namespace, optimizer: MegatronOptimizer, settings: Settings) -> None:
    """Give the groups their settings of the flags back; those of the schedule only where it is the flags'.

    Args:
        args: the flags.
        optimizer: with a checkpoint's state.
        settings: what ``of_flags`` returned before.
    """
    kept = _OF_THE_SCHEDULE if args.use_checkpoint_opt_param_scheduler else frozenset()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update({name: value for name, value in own.items() if name not in kept})


def load_schedule(schedule: OptimizerParamScheduler, content: dict[str, Any]) -> None:
    """Let a schedule go on where it stood; the learning rate and weight decay of the next update follow.

    Raises:
        UsageError: it is not the checkpoint's, and no flag says which one counts.
    """
    schedule.num_steps = 0  # 'load_state_dict' adds
    schedule.load_state_dict(content)  # an adaptor says what differs (``shared/resumed_schedule.py``)
    schedule.step(0)  # upstream sets the decay before it has read it


def go_on_without_optimizer(
    args: Namespace, schedule: OptimizerParamScheduler, content: dict[str, Any] | None, samples: int
) -> None:
    """Put the schedule where the run stands, if a flag says which one counts; else it begins again.

    Args:
        args: the flags, with ``--no-load-optim``.
        schedule: of the flags.
        content: the checkpoint's schedule; None: it has none.
        samples: that the run has been trained with.

    Raises:
        UsageError: the checkpoint's schedule is asked for, and there is none.
    """
    if args.finetune or not (args.use_checkpoint_opt_param_scheduler or args.override_opt_param_scheduler):
        return
    if content is not None:
        load_schedule(schedule, content)
        return
    if args.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            f"--use-checkpoint-opt_param-scheduler with --load {args.load}, which contains no schedule",
            "a checkpoint that `megatron-npu pretrain` saved with its optimizer",
            "Pass --override-opt_param-scheduler and the flags of the schedule.",
        )
    schedule.num_steps = 0
    schedule.step(samples)
