"""Use the device's generator in Megatron's RNG tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.patching.registry import Recorder


def connect(recorder: Recorder, module: str) -> None:
    """Record that the generator's state is set at once in an older tree.

    Args:
        recorder: that of the checkout.
        module: where its RNG tracker is.
    """
    recorder.replace(
        f"{module}:_set_cuda_rng_state",
        devices=WITHOUT_CUDA,
        why="upstream queues the change until CUDA is initialised, which never happens: fork() would neither "
        "set nor restore a state, and nothing would fail",
    )(set_cuda_rng_state)


def connect_host(recorder: Recorder) -> None:
    """Record that ``megatron.training:get_model`` draws weights from the host's generator."""
    recorder.around(
        "megatron.training:get_model",
        devices=("cpu",),
        why="weights that are initialised on the host draw from the host's generator; on a cpu the default "
        "one is the device's",
    )(build_on_host)


def build_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the model with the host's generator in force; the RNG tracker's own states are not affected."""
    with devices.current().host_rng():
        return original(*args, **kwargs)


def set_cuda_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Put ``new_state`` (bytes, on the CPU) into the generator of this process's device, now.

    Args:
        device: for upstream's callers, whose only value is the current device.
        graph_safe: for CUDA graphs, in megatron-core.
    """
    devices.current().set_rng_state(new_state)
