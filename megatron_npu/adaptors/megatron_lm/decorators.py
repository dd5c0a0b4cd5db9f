"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

from megatron_npu.patching.registry import Recorder, registry

UPSTREAM = "megatron_lm"
WITHOUT_CUDA = ("npu", "cpu")

_recorder = Recorder(registry, UPSTREAM)
replace, around, wrap = _recorder.replace, _recorder.around, _recorder.wrap
constant, watch = _recorder.constant, _recorder.watch
