"""The decorators of ``patching``, with this upstream filled in."""

from __future__ import annotations

import importlib.util
from functools import partial

from megatron_npu.patching.registry import Recorder, registry

UPSTREAM = "megatron_core"
WITHOUT_CUDA = ("npu", "cpu")
NOT_FIXED = "no version up to 0.16.1 has the fix, and no issue has been filed upstream"  # ``until`` of a bug

_recorder = Recorder(registry, UPSTREAM)
replace, around, wrap = _recorder.replace, _recorder.around, _recorder.wrap
constant, watch = _recorder.constant, _recorder.watch


def installed(*packages: str) -> str | None:
    """Return why a patch for the absence of all of them is not needed: the first that is installed."""
    found = (f"{package} is installed" for package in packages if importlib.util.find_spec(package))
    return next(found, None)


transformer_engine_present = partial(installed, "transformer_engine")
fused_optimizer_present = partial(installed, "transformer_engine", "apex")
