"""``megatron.fused_kernels``."""

from __future__ import annotations

from typing import Any

from megatron_npu.hosts.megatron_lm.records import replace


@replace(
    "megatron.fused_kernels:load",
    why="it compiles CUDA kernels with nvcc, inside the checkout; every one of them has an operation here",
)
def load(args: Any) -> None:
    """Build nothing."""
