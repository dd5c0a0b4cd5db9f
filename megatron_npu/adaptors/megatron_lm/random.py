"""Generators: the device's behind the RNG tracker, the host's for initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.adaptors.shared.random import set_cuda_rng_state

replace(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change until CUDA is initialised, which never happens: fork() would neither set "
    "nor restore a state, and nothing would fail",
)(set_cuda_rng_state)


@around(
    "megatron.training:get_model",
    devices=("cpu",),
    why="weights that are initialised on the host draw from the host's generator; on a cpu the default one "
    "is the device's",
)
def build_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the model with the host's generator in force; the RNG tracker's own states are not affected."""
    with devices.current().host_rng():
        return original(*args, **kwargs)
