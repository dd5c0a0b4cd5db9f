"""Patch ``megatron.checkpointing`` to load checkpoints safely, with or without DeepSpeed's engine."""

from __future__ import annotations

from types import ModuleType

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_checkpoints
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared import resumed_schedule


def _enumerations() -> list[ModuleType]:
    from megatron.core import enums as of_core
    from megatron.core.transformer import enums as of_layers
    from megatron.model import enums as of_models

    return [of_core, of_layers, of_models]


connect_checkpoints(records, _enumerations)
records.around(
    "megatron.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set",
    why=resumed_schedule.WHY,
)(resumed_schedule.refuse_in_one_line)
