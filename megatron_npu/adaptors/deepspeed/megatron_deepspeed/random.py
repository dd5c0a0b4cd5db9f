"""The device's generator behind the RNG tracker."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared import random

random.connect(records, "megatron.mpu.random")
