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


def transformer_engine_present() -> str | None:
    """Return why a patch for its absence is not needed: TransformerEngine is installed."""
    present = importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine is installed" if present else None


def fused_optimizer_present() -> str | None:
    """Return why the optimizer patches are not needed: TransformerEngine or apex brings its own."""
    for package in ("transformer_engine", "apex"):
        if importlib.util.find_spec(package) is not None:
            return f"{package} is installed and brings FusedAdam"
    return None
