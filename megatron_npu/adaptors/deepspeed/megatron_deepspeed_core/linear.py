"""The products of parallel linear layers; connects ``tensor_parallel.layers``."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared import linear_products

linear_products.connect(records)
