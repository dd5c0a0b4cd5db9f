"""The device's generator behind Megatron's RNG tracker."""

from __future__ import annotations

from torch import Tensor

from megatron_npu import devices


def set_cuda_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Put ``new_state`` (bytes, on the CPU) into the generator of this process's device, now.

    Args:
        device: for upstream's callers, whose only value is the current device.
        graph_safe: for CUDA graphs, in megatron-core.
    """
    devices.current().set_rng_state(new_state)
