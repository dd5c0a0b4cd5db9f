"""Support ``--check-weight-hash-across-dp-replicas-interval``, and report the rank and parameter that differ.

Patches ``megatron.training.training``, which asserts that replicas are equal; libraries that call
``megatron.core.utils`` themselves still get upstream's boolean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.checkpoint_files import replicas


@around(
    "megatron.training.training:check_param_hashes_across_dp_replicas",
    why="upstream logs which parameter differs only at level INFO, and only if rank 0 is not the faulty "
    "one; then every rank ends with the traceback of an assertion that names neither",
)
def name_what_differs(
    original: Callable[..., bool], model: list[Any], cross_check: bool = False, *args: Any, **kwargs: Any
) -> bool:
    """Report which parameter differs on which ranks, if upstream finds a difference between replicas."""
    same = original(model, cross_check, *args, **kwargs)
    if not same:
        replicas.check_megatron(model)
    return same


@around(
    "megatron.training.training:finalize_model_grads",
    why="--check-weight-hash-across-dp-replicas-interval finds a gradient that differs between replicas "
    "only after it has corrupted the weights",
)
def compare_gradients(original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Compare the reduced gradients at the iterations at which upstream compares the weights."""
    from megatron.training.global_vars import get_args

    result = original(model, *args, **kwargs)
    given = get_args()
    interval = given.check_weight_hash_across_dp_replicas_interval
    if interval and (given.curr_iteration + 1) % interval == 0 and hasattr(model[0], "ddp_config"):
        replicas.check_megatron_gradients(model)
    return result
