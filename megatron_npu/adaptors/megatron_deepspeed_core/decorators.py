"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

from megatron_npu.adaptors.shared.decorators import recorder

records = recorder("megatron_deepspeed_core")
replace, around, constant = records.replace, records.around, records.constant
