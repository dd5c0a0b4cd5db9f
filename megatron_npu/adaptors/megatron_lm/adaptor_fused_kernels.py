"""``megatron.fused_kernels``."""

from __future__ import annotations

from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import replace


@replace(
    "megatron.fused_kernels:load",
    why="it compiles CUDA kernels with nvcc, inside the checkout; every one of them has an operation here",
)
def load(args: Any) -> None:
    """Build nothing."""
