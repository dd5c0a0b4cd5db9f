"""``transformer_engine.pytorch.distributed``: recomputation, and the random states of model parallelism."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from megatron_npu.base.errors import UsageError


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``; megatron-core's own recomputes it in the backward pass.

    Args:
        distribute_saved_activations: cut the first argument into as many parts as tensor-parallel ranks.
        get_rng_state_tracker, tp_group: megatron-core's own are taken.
    """
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(partial(function, **kwargs), distribute_saved_activations, *args)


def activation_recompute_forward(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Return a context that changes nothing: it keeps the scales of fp8 between the two forward passes."""
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False."""
    return False


class CudaRNGStatesTracker:
    """What upstream's tracker for TransformerEngine is derived from; megatron-core's own takes its place.

    Raises:
        UsageError: it is made.
    """

    def __init__(self) -> None:
        raise UsageError(
            "TransformerEngine's tracker of random states without TransformerEngine",
            "megatron-core's own, which does the same",
            "Remove --te-rng-tracker (use_te_rng_tracker).",
        )
