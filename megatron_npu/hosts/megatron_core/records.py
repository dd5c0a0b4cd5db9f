"""The decorators of ``patching``, with this host filled in."""

from __future__ import annotations

import importlib.util
from functools import partial

from megatron_npu.patching.record import registry

HOST = "megatron_core"
WITHOUT_CUDA = ("npu", "cpu")

replace = partial(registry.replace, host=HOST)
wrap = partial(registry.wrap, host=HOST)
constant = partial(registry.constant, host=HOST)


def installed(*packages: str) -> str | None:
    """Return why a patch for the absence of all of them is not needed: the first that is installed."""
    found = (f"{package} is installed" for package in packages if importlib.util.find_spec(package))
    return next(found, None)


transformer_engine_present = partial(installed, "transformer_engine")
fused_optimizer_present = partial(installed, "transformer_engine", "apex")
