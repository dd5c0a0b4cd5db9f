"""Set the optimizer and the schedule according to the current flags when a run resumes from a checkpoint.

The parameter groups of an optimizer are saved with their settings (betas, epsilon, maximum and minimum
learning rate), and torch loads these with the moments. Upstream's schedule reads them first, so the learning
rates would be those of the old run even with ``--override-opt_param-scheduler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags.checkpoint_parts import LoadFlags

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_STATE = frozenset({"params", "step"})  # which training changes: never a flag's
_OF_THE_SCHEDULE = frozenset({"max_lr", "min_lr", "start_wd", "end_wd"})

Settings = list[dict[str, Any]]


def of_flags(optimizer: MegatronOptimizer) -> Settings:
    """Return the settings of each parameter group, as the flags define them, before a checkpoint is
    loaded.
    """
    return [
        {name: value for name, value in group.items() if name not in _STATE}
        for group in optimizer.param_groups
    ]


def restore(flags: LoadFlags, optimizer: MegatronOptimizer, settings: Settings) -> None:
    """Restore the settings of the parameter groups that the flags define.

    With --use-checkpoint-opt-param-scheduler, the settings of the schedule remain those of the checkpoint.

    Args:
        flags: the flags.
        optimizer: the optimizer, into which the checkpoint's state has been loaded.
        settings: the earlier result of ``of_flags``.
    """
    kept = _OF_THE_SCHEDULE if flags.use_checkpoint_opt_param_scheduler else frozenset()
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update({name: value for name, value in own.items() if name not in kept})


def load_schedule(schedule: OptimizerParamScheduler, content: dict[str, Any]) -> None:
    """Resume the schedule, and set the learning rate and weight decay for the next update.

    Raises:
        UsageError: the schedule differs from the checkpoint's, and no flag selects one.
    """
    schedule.num_steps = 0  # 'load_state_dict' adds
    schedule.load_state_dict(content)  # an adaptor says what differs (``shared/resumed_schedule.py``)
    schedule.step(0)  # upstream sets the decay before it has read it


def go_on_without_optimizer(
    flags: LoadFlags, schedule: OptimizerParamScheduler, content: dict[str, Any] | None, samples: int
) -> None:
    """Set the schedule to the run's position, without the optimizer's state, if a flag selects a schedule.

    Otherwise the schedule restarts.

    Args:
        flags: the flags, with ``--no-load-optim``.
        schedule: the schedule that the flags define.
        content: the checkpoint's schedule, or None.
        samples: the number of samples that the run has used.

    Raises:
        UsageError: the checkpoint's schedule is requested, but the checkpoint has none.
    """
    if flags.finetune or not (flags.use_checkpoint_opt_param_scheduler or flags.override_opt_param_scheduler):
        return
    if content is not None:
        before = {name: getattr(schedule, name) for name in sorted(_OF_THE_SCHEDULE)}
        load_schedule(schedule, content)
        _pass_to_groups(schedule, before)
        return
    if flags.use_checkpoint_opt_param_scheduler:
        raise UsageError(
            "--use-checkpoint-opt_param-scheduler requires a checkpoint that `megatron-npu pretrain` "
            f"saved with its optimizer, but --load {flags.load} contains no learning-rate schedule",
            remedy="Pass --override-opt_param-scheduler and the schedule's flags.",
        )
    schedule.num_steps = 0
    schedule.step(samples)


def _pass_to_groups(schedule: OptimizerParamScheduler, before: dict[str, float]) -> None:
    """Pass the schedule's settings to the parameter groups that had its earlier ones.

    ``get_lr`` reads the settings of a group first, and those of a new optimizer are the flags'.

    Args:
        schedule: the schedule, into which the checkpoint's has been loaded.
        before: its settings before that.
    """
    for group in schedule.optimizer.param_groups:
        for name, value in before.items():
            if group.get(name) == value:
                group[name] = getattr(schedule, name)
    schedule.step(0)
