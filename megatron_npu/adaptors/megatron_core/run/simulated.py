"""Mark runs on simulated NPUs in logs and in TensorBoard.

Patches ``megatron.training.utils`` and ``megatron.training.global_vars``.
"""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared import simulated

for _module, _versions in (("utils", "<0.18"), ("utils.common_utils", ">=0.18")):
    around(
        f"megatron.training.{_module}:print_rank_last",
        versions=_versions,
        devices=("npu",),
        condition=simulated.on_hardware,
        why=simulated.WHY_LINE,
    )(simulated.mark_line)

around(
    "megatron.training.global_vars:_set_tensorboard_writer",
    devices=("npu",),
    condition=simulated.on_hardware,
    why=simulated.WHY_BOARD,
)(simulated.mark_board)
