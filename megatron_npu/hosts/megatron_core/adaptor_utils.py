"""``megatron.core.utils``: questions about TransformerEngine where it is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from packaging.version import Version

from megatron_npu.hosts.megatron_core.records import replace


def transformer_engine_present() -> str | None:
    present = importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine is installed" if present else None


@replace(
    "megatron.core.utils:get_te_version",
    versions="<0.16",
    condition=transformer_engine_present,
    why="0.12 imports TransformerEngine for the answer, 0.13 to 0.15 give None, which cannot be compared: "
    "loading a checkpoint asks",
)
def get_te_version() -> Any:
    """Return version 0, older than any that is asked for."""
    return Version("0")
