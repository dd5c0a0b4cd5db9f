"""``megatron.core.jit``: the decorator that compiles the fused element-wise functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace

Function = TypeVar("Function", bound=Callable)


@replace(
    "megatron.core.jit:jit_fuser",
    devices=WITHOUT_CUDA,
    early=True,
    why="torch.compile needs a C++ compiler on cpu and fails in torch_npu's inductor; "
    "the functions it would fuse are replaced by fused operations instead",
    until="torch_npu's inductor compiles megatron-core's fusions",
)
def jit_fuser(function: Function) -> Function:
    """Leave the function as it is."""
    return function
