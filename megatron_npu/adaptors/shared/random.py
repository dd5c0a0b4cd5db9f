"""Use the device's generator in Megatron's RNG tracker, even after loading a checkpoint from another type
of device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.patching.registry import Recorder

logger = logging.getLogger(__name__)

OTHER_DEVICE = (
    "a CPU's generator (mt19937) has 5,056 bytes of state, an NPU's or GPU's (Philox) 16: upstream stops "
    "with 'RNG state is wrong size' when it loads a checkpoint that another type of device saved"
)


def connect(recorder: Recorder, module: str) -> None:
    """Record a patch that makes an older checkout set the generator's state immediately.

    Args:
        recorder: the checkout's recorder.
        module: the module that contains the tree's RNG tracker.
    """
    recorder.replace(
        f"{module}:_set_cuda_rng_state",
        devices=WITHOUT_CUDA,
        why="upstream queues the change until CUDA is initialized, which never happens: fork() would "
        "neither set nor restore a state, and nothing would fail",
    )(set_cuda_rng_state)


def connect_host(recorder: Recorder) -> None:
    """Record a patch that makes ``megatron.training:get_model`` draw weights with the host's generator."""
    recorder.around(
        "megatron.training:get_model",
        devices=("cpu",),
        why="weights initialized on the host are drawn from the host's generator, but on a cpu the default "
        "generator is the device's",
    )(build_on_host)


def build_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the model, drawing its weights with the host's generator.

    The states of the RNG tracker are not affected.
    """
    with devices.current().host_rng():
        return original(*args, **kwargs)


def set_cuda_rng_state(new_state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Set the state of this process's device generator to ``new_state`` (bytes in host memory) immediately.

    Args:
        device: accepted for upstream's callers, which always pass the current device.
        graph_safe: accepted for megatron-core, which uses it for CUDA graphs.
    """
    devices.current().set_rng_state(new_state)


def with_own_generators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint, but keep this run's generator states if the checkpoint was saved on another type of
    device.

    ``original`` is upstream's ``_load_base_checkpoint``, whose first result contains the states.
    """
    result = original(*args, **kwargs)
    if inspect.signature(original).bind(*args, **kwargs).arguments.get("rank0"):
        return result  # read for the arguments in it
    device = devices.current()
    for states in _generator_states(result[0]):
        reason = device.why_not_restored(states["cuda_rng_state"])
        if reason is not None:
            _keep(states, device.rng_state())
            if dist.get_rank() == 0:
                logger.warning(reason)
    return result


def _generator_states(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the generator states in a checkpoint, which upstream stores in one of three forms."""
    if not isinstance(content, dict):
        return
    found = content.get("rng_state") or [content]
    if isinstance(found, dict):  # by pipeline and tensor-parallel rank, in the format fsdp_dtensor
        found = [state for each in found.values() for state in each]
    yield from (state for state in found if isinstance(state, dict) and "cuda_rng_state" in state)


def _keep(states: dict[str, Any], own: Tensor) -> None:
    """Replace the generator states in a checkpoint with those of this run."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states["cuda_rng_state"], states["rng_tracker_states"] = own, get_cuda_rng_tracker().get_states()
