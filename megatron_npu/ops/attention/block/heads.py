"""Convert between ``[s, b, n, d]`` with grouped key heads and ``[b, n, s, d]`` with repeated key heads."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.layouts import from_bnsd, to_bnsd

LAYOUT = "SBND"


def heads_first(tensor: Tensor) -> Tensor:
    """Return a view of a tensor ``[s, b, n, d]`` with the dimensions in the order ``[b, n, s, d]``."""
    return to_bnsd(tensor, LAYOUT, tensor.size(2))


def heads_third(tensor: Tensor) -> Tensor:
    """Return a view of a tensor ``[b, n, s, d]`` with the dimensions in the order ``[s, b, n, d]``."""
    return from_bnsd(tensor, LAYOUT)


def ungroup(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as ``[b, n, s, d]``, with grouped key heads repeated.

    Keys and values are repeated for each query head of their group.

    Args:
        query: ``[sq, b, n, d]``.
        key: ``[sk, b, g, d]``, where g divides n.
        value: like ``key``.
    """
    heads = query.size(2)
    query, key, value = (heads_first(t) for t in (query, key, value))
    if key.size(1) != heads:
        key, value = (t.repeat_interleave(heads // t.size(1), dim=1) for t in (key, value))
    return query, key, value


def regroup(
    grads: tuple[Tensor, Tensor, Tensor], key_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert gradients of the results of ``ungroup`` to gradients of its arguments.

    The gradients of a group's heads are summed in fp32.

    Args:
        grads: gradients of query, key and value, ``[b, n, s, d]``.
        key_heads: number of key heads, g.
        dtype: dtype of the summed gradients of keys and values.
    """
    query, key, value = grads
    if query.size(1) != key_heads:
        precise = torch.promote_types(dtype, torch.float32)
        key, value = (t.unflatten(1, (key_heads, -1)).sum(2, dtype=precise).to(dtype) for t in (key, value))
    return heads_third(query), heads_third(key), heads_third(value)
