"""What the adaptors of every upstream record their patches with."""

from __future__ import annotations

import importlib.util

from megatron_npu.patching.registry import Recorder, registry

WITHOUT_CUDA = ("npu", "cpu")


def recorder(upstream: str) -> Recorder:
    """Return the decorators of ``patching`` with ``upstream`` filled in."""
    return Recorder(registry, upstream)


def installed(*packages: str) -> str | None:
    """Return why a patch for the absence of all of them is not needed: the first that is installed."""
    found = (f"{package} is installed" for package in packages if importlib.util.find_spec(package))
    return next(found, None)
