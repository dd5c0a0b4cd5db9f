"""DeepSpeed's engine, which trains with ``--deepspeed``."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared import deepspeed_engine

deepspeed_engine.connect(records, "megatron.core.parallel_state")
