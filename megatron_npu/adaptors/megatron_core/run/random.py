"""Patch ``megatron.core.tensor_parallel.random`` to use the device's generator in the RNG tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_npu.adaptors.megatron_core.decorators import (
    NOT_FIXED,
    WITHOUT_CUDA,
    around,
    replace,
    transformer_engine_present,
)
from megatron_npu.adaptors.shared.random import set_cuda_rng_state

replace(
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change with _lazy_call until CUDA is initialized, which never happens: fork() "
    "would neither set nor restore a state, and tensor-parallel ranks would share masks",
)(set_cuda_rng_state)


@around(
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    versions=">=0.13",
    condition=transformer_engine_present,
    upstream_bug=True,
    until=NOT_FIXED,
    why="upstream treats fp8=False, its own default, as a request for fp8: without TransformerEngine the "
    "recomputation of moe_act and mla_up_proj raises a NameError",
)
def false_is_no_fp8(
    original: Callable[..., None], self: Any, fp8: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Pass None instead of False for the argument ``fp8``."""
    original(self, fp8 or None, *args, **kwargs)


@around(
    "megatron.core.tensor_parallel.random:checkpoint",
    upstream_bug=True,
    until=NOT_FIXED,
    why="with --recompute-modules mlp, an MLP returns its bias together with its output; activation "
    "checkpointing makes that parameter a non-leaf, and its backward pass calls itself until memory "
    "runs out",
)
def checkpoint_returns_aliases(
    original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Make a recomputed function return aliases of parameters instead of the parameters themselves."""

    def returning_aliases(*inputs: Any) -> Any:
        return tree_map_only(torch.nn.Parameter, _alias, function(*inputs))

    return original(returning_aliases, *args, **kwargs)


def _alias(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.view_as(parameter)
