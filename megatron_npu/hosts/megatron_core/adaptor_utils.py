"""``megatron.core.utils``: questions about TransformerEngine where it is not installed."""

from __future__ import annotations

from packaging.version import Version

from megatron_npu.hosts.megatron_core.records import replace, transformer_engine_present


@replace(
    "megatron.core.utils:get_te_version",
    condition=transformer_engine_present,
    why="0.12 imports TransformerEngine for the answer, 0.13 to 0.16 give None, which cannot be compared: "
    "loading a checkpoint asks, and the check of --rotary-interleaved",
)
def get_te_version() -> Version:
    """Return version 0, older than any that is asked for."""
    return Version("0")
