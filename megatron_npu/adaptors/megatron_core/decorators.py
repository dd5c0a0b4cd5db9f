"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

from functools import partial

from megatron_npu.adaptors.shared import decorators

WITHOUT_CUDA, installed = decorators.WITHOUT_CUDA, decorators.installed
NOT_FIXED = "no version up to 0.19.2 has the fix, and no issue has been filed upstream"  # ``until`` of a bug

_recorder = decorators.recorder("megatron_core")
replace, around, wrap = _recorder.replace, _recorder.around, _recorder.wrap
constant, watch = _recorder.constant, _recorder.watch

transformer_engine_present = partial(installed, "transformer_engine")
fused_optimizer_present = partial(installed, "transformer_engine", "apex")
