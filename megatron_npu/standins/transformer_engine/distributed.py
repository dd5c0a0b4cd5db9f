"""Stub for ``transformer_engine.pytorch.distributed``, with recomputation and model-parallel random
states.
"""

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
    """Return ``function(*args, **kwargs)``, which is recomputed in the backward pass by megatron-core's
    checkpoint.

    Args:
        distribute_saved_activations: whether to split the first argument over the tensor-parallel ranks.
        get_rng_state_tracker, tp_group: ignored; those of megatron-core are used.
    """
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(partial(function, **kwargs), distribute_saved_activations, *args)


def activation_recompute_forward(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Return a context that has no effect.

    TransformerEngine's context keeps fp8 scales between forward passes.
    """
    return nullcontext()


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False, because fp8 is not supported."""
    return False


class CudaRNGStatesTracker:
    """Base class of upstream's RNG tracker for TransformerEngine.

    megatron-core's own tracker is used instead.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self) -> None:
        raise UsageError(
            "TransformerEngine's RNG state tracker was requested, but TransformerEngine is not installed; "
            "megatron-core's own tracker does the same. Remove --te-rng-tracker (use_te_rng_tracker)."
        )
