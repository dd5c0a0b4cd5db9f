"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_start
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records

connect_start(records)
