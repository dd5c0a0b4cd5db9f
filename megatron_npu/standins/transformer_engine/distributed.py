"""``transformer_engine.pytorch.distributed``: recomputation, and RNG states of model parallelism."""

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
    """Return ``function(*args, **kwargs)``; megatron-core's own checkpoint recomputes it in backward.

    Args:
        distribute_saved_activations: whether to split the first argument over the tensor-parallel ranks.
        get_rng_state_tracker, tp_group: ignored; megatron-core's own are used.
    """
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(partial(function, **kwargs), distribute_saved_activations, *args)


def activation_recompute_forward(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Return a context that does nothing; TransformerEngine's keeps fp8 scales between forward passes."""
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False."""
    return False


class CudaRNGStatesTracker:
    """The base class of upstream's tracker for TransformerEngine; megatron-core's own is used instead.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self) -> None:
        raise UsageError(
            "TransformerEngine's tracker of random states without TransformerEngine",
            "megatron-core's own, which does the same",
            "Remove --te-rng-tracker (use_te_rng_tracker).",
        )
