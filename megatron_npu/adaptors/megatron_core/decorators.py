"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

from functools import partial

from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA, installed, recorder

__all__ = [
    "NOT_FIXED",
    "WITHOUT_CUDA",
    "around",
    "constant",
    "fused_optimizer_present",
    "installed",
    "replace",
    "transformer_engine_present",
    "watch",
    "wrap",
]

NOT_FIXED = "no version up to 0.16.1 has the fix, and no issue has been filed upstream"  # ``until`` of a bug

_recorder = recorder("megatron_core")
replace, around, wrap = _recorder.replace, _recorder.around, _recorder.wrap
constant, watch = _recorder.constant, _recorder.watch

transformer_engine_present = partial(installed, "transformer_engine")
fused_optimizer_present = partial(installed, "transformer_engine", "apex")
