"""Element-wise functions of the layers that upstream leaves to TorchScript's fusers."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared import fusions

fusions.connect(records)
fusions.connect_gelu(records)
