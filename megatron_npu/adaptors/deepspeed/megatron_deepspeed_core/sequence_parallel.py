"""Support DeepSpeed's sequence parallelism (Ulysses, Jacobs et al. 2023).

Tokens are exchanged for heads in attention. ``attention`` uses this module when it builds the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.rotary import turn

_BATCH_DIMENSION = 1  # of [s, b, n, d]


def give_mask(exchange: Any) -> None:
    """Make ``DistributedAttention`` accept the mask that upstream passes without flash attention.

    Upstream passes the mask where DeepSpeed 0.19.8 expects the index of the batch dimension, passes no
    positions, and has already merged the heads that DeepSpeed distributes again.

    Args:
        exchange: the module; its ``rotary_tables`` are set before each call.
    """
    core = exchange.local_attn
    core.forward = functools.partial(_with_heads, core.forward)
    exchange.rotary_tables = None
    exchange.forward = functools.partial(_attend, exchange, exchange.forward)


def _with_heads(original: Callable[..., Tensor], query: Tensor, *others: Tensor | None) -> Tensor:
    """Return the attention output as ``[s, b, n, d]``."""
    return original(query, *others).unflatten(2, query.shape[2:])


def _attend(
    exchange: Any,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """Compute attention over this rank's tokens: map ``[s/p, b, n, d]`` to ``[s/p, b, n * d]``.

    The mask covers the tokens of all ranks.
    """
    if exchange.rotary_tables is not None:
        from megatron.core import parallel_state

        size = query.size(0)
        rows = exchange.rotary_tables[parallel_state.get_sequence_parallel_rank() * size :]
        query, key = turn(query, rows), turn(key, rows)
    return original(query, key, value, _BATCH_DIMENSION, None, attention_mask).flatten(2)
