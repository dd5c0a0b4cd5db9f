"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

from megatron_npu.adaptors.shared.decorators import recorder

_recorder = recorder("megatron_deepspeed")
replace, around, wrap = _recorder.replace, _recorder.around, _recorder.wrap
constant, watch = _recorder.constant, _recorder.watch
