"""``megatron.core.tensor_parallel.random``: the device's generator behind Megatron's RNG tracker."""

from __future__ import annotations

import torch

from megatron_npu import devices
from megatron_npu.hosts.megatron_core.records import WITHOUT_CUDA, replace


@replace(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change with _lazy_call until CUDA is initialised, which never happens: "
    "fork() would neither set nor restore a state, and tensor-parallel ranks would share masks",
)
def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Put ``new_state`` into the generator of this process's device, now."""
    devices.current().set_rng_state(new_state)
