"""``megatron.core.datasets``: the index builder that upstream compiles when training starts."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import replace


@replace(
    "megatron.core.datasets.utils:compile_helpers",
    why="it runs make inside the checkout, for whichever python3-config is first on the path, and ends the "
    "process if that fails; helpers_cpp is compiled already or a stand-in",
)
def compile_helpers() -> None:
    """Build nothing."""
