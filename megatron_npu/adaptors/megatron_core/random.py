"""``megatron.core.tensor_parallel.random``: the device's generator behind Megatron's RNG tracker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import (
    WITHOUT_CUDA,
    replace,
    transformer_engine_present,
    wrap,
)


@replace(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change with _lazy_call until CUDA is initialised, which never happens: "
    "fork() would neither set nor restore a state, and tensor-parallel ranks would share masks",
)
def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Put ``new_state`` into the generator of this process's device, now."""
    devices.current().set_rng_state(new_state)


@wrap(
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    versions=">=0.13",
    condition=transformer_engine_present,
    why="upstream takes its own default, fp8=False, for fp8: the recomputation of moe_act and mla_up_proj "
    "ends in a NameError without TransformerEngine",
)
def without_fp8(original: Callable[..., None]) -> Callable[..., None]:
    """Say None for no fp8."""

    @functools.wraps(original)
    def initialise(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    return initialise


@wrap(
    "megatron.core.tensor_parallel.random:checkpoint",
    why="an MLP returns its bias beside its output; returned by a checkpoint, that parameter is no leaf any "
    "more, and its backward pass calls itself until memory ends: --recompute-modules mlp",
)
def without_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return aliases of parameters from the function that is recomputed."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def returning_aliases(*inputs: Any) -> Any:
            return tree_map_only(torch.nn.Parameter, _alias, function(*inputs))

        return original(returning_aliases, *args, **kwargs)

    return checkpoint


def _alias(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.view_as(parameter)
