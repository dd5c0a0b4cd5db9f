"""DeepSpeed's engine, which trains with ``--deepspeed``."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed import deepspeed_engine
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records

deepspeed_engine.connect(records, "megatron.mpu")
