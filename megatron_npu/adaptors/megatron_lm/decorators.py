"""Provide the decorators of ``patching``, bound to this upstream."""

from __future__ import annotations

from megatron_npu.adaptors.shared.decorators import recorder

records = recorder("megatron_lm")
replace, around, wrap = records.replace, records.around, records.wrap
constant, watch = records.constant, records.watch
