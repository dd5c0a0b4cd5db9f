"""``megatron.utils``, ``megatron.global_vars``: runs on simulated NPUs say so in log and TensorBoard."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import simulated

around(
    "megatron.utils:print_rank_last",
    devices=("npu",),
    condition=simulated.on_hardware,
    why=simulated.WHY_LINE,
)(simulated.mark_line)

around(
    "megatron.global_vars:_set_tensorboard_writer",
    devices=("npu",),
    condition=simulated.on_hardware,
    why=simulated.WHY_BOARD,
)(simulated.mark_board)
