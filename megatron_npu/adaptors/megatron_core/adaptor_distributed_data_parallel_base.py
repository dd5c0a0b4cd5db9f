"""``megatron.core.distributed.data_parallel_base``: what every way of data parallelism has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap


@wrap(
    "megatron.core.distributed.data_parallel_base:_BaseDataParallel.finish_grad_sync",
    versions=">=0.16",
    why="finalize_model_grads passes force_all_reduce, which 0.16 has forgotten here: torch's FSDP, which "
    "has no method of its own, ends in a TypeError",
)
def accept_force_all_reduce(original: Callable[[Any], None]) -> Callable[..., None]:
    """Take the argument, which means nothing where nothing is reduced."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
        original(self)

    return finish_grad_sync
