"""16-bit training without DeepSpeed's engine: what crosses the model's border, and overflows of old NPUs."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared import mixed_precision

mixed_precision.connect(records, "Float16OptimizerWithFloat16Params")
