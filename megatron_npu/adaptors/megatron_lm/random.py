"""Generators: the device's behind the RNG tracker, the host's for initial weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import WITHOUT_CUDA, replace, wrap


@replace(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change until CUDA is initialised, which never happens: fork() would neither set "
    "nor restore a state, and nothing would fail",
)
def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Put ``new_state`` into the generator of this process's device, now."""
    devices.current().set_rng_state(new_state)


@wrap(
    "megatron.training:get_model",
    devices=("cpu",),
    why="weights that are initialised on the host draw from the host's generator; on a cpu the default one "
    "is the device's",
)
def build_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the model with the host's generator in force; the RNG tracker's own states are not affected."""

    @functools.wraps(original)
    def get_model(*args: Any, **kwargs: Any) -> Any:
        with devices.current().host_rng():
            return original(*args, **kwargs)

    return get_model
