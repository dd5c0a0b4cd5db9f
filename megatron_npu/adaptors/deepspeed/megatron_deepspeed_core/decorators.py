"""Provide the decorators of ``patching``, bound to this upstream."""

from __future__ import annotations

from functools import partial

from megatron_npu.adaptors.shared.decorators import backports_not_wanted, recorder

records = recorder("megatron_deepspeed_core")
replace, around, constant = records.replace, records.around, records.constant
UNTIL = "never: 4efb479d is the last commit"
backport = partial(
    around,
    upstream_bug=True,
    condition=backports_not_wanted,
    until=UNTIL,
)
