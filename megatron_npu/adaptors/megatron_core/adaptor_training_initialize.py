"""``megatron.training.initialize`` of a Megatron-LM checkout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace, wrap
from megatron_npu.adaptors.shared import rendezvous


@wrap(
    "megatron.training.initialize:initialize_megatron",
    devices=WITHOUT_CUDA,
    why="its assertion that CUDA is available has an argument to turn it off; without a launcher nobody "
    "sets MASTER_ADDR",
)
def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call it with ``allow_no_cuda=True``, and with an address to meet at."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        rendezvous.provide_address()
        given = signature.bind(*args, **kwargs)
        given.arguments["allow_no_cuda"] = True
        return original(*given.args, **given.kwargs)

    return initialize_megatron


@replace(
    "megatron.legacy.fused_kernels:load",
    devices=WITHOUT_CUDA,
    why="it compiles CUDA kernels with nvcc, which nothing uses here",
)
def load(args: Any) -> None:
    """Build nothing."""
