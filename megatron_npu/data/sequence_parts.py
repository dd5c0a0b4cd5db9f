"""Select the part of a batch that a context-parallel rank processes, for each version of megatron-core."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def part_of_this_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch's tensors ``[b, s]`` that this rank processes.

    Without context parallelism, this is the whole batch.

    Returns:
        Tensors with the same names, ``[b, s / cp]``: the two of 2 cp equal chunks that upstream assigns to
        this rank.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    options: dict[str, Any] = {}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # since 0.18, no default
        options = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(batch, **options)
