"""DeepSpeed's engine, which trains with ``--deepspeed``."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed import deepspeed_engine
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import records

deepspeed_engine.connect(records, "megatron.core.parallel_state")
