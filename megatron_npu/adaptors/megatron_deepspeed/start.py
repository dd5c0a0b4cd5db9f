"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared.deepspeed import connect_start

connect_start(records)
