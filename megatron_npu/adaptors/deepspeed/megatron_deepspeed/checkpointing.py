"""``megatron.checkpointing``: checkpoints, also of DeepSpeed's engine: no code is run, damage is found."""

from __future__ import annotations

from types import ModuleType

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_checkpoints
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records


def _enumerations() -> list[ModuleType]:
    from megatron import enums

    return [enums]


connect_checkpoints(records, _enumerations)
