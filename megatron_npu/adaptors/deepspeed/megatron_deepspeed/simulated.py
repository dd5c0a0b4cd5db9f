"""``megatron``, ``megatron.global_vars``: runs on simulated NPUs say so in log and TensorBoard."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared import simulated

simulated.connect_old_tree(records, "megatron:print_rank_last")
