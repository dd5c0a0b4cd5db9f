"""``megatron.core.tensor_parallel.layers``: weights that are initialised on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.hosts.megatron_core.records import wrap


@wrap(
    "megatron.core.tensor_parallel.layers:_initialize_affine_weight_cpu",
    devices=("cpu",),
    why="--use-cpu-initialization draws from the host's generator; on a cpu the default one is the device's",
)
def initialize_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draw the whole weight from the host's generator, the same on every tensor-parallel rank."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with devices.current().host_rng():
            return original(*args, **kwargs)

    return initialize
