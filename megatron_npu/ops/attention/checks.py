"""Check the arguments of ``attention`` against each other and against the shapes of the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.layouts import HEADLESS, LAYOUTS, bnsd_shape
from megatron_npu.ops.attention.spec import PackedSequences, Window


def head_counts(query: Tensor, key: Tensor, layout: str, num_heads: int | None) -> tuple[int, int]:
    """Return the number of query heads and the number of key heads.

    Args:
        query, key: in ``layout``.
        layout: one of ``layouts.LAYOUTS``.
        num_heads: number of query heads; needed for layouts that merge heads and head size.

    Raises:
        ValueError: the layout is unknown, the number of dimensions is wrong, or the key heads do not divide
            the query heads.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, given {layout!r}")
    dimensions = 3 if layout in HEADLESS or layout == "TND" else 4
    for tensor in (query, key):
        if tensor.dim() != dimensions:
            raise ValueError(f"layout {layout} has {dimensions} dimensions, given {tuple(tensor.shape)}")
    if layout in HEADLESS:
        heads, key_heads = _headless(query.size(-1), key.size(-1), layout, num_heads)
    else:
        place = 1 if layout in ("BNSD", "TND") else 2
        heads, key_heads = query.size(place), key.size(place)
    if not key_heads or heads % key_heads:
        raise ValueError(f"{key_heads} key heads do not divide {heads} query heads")
    return heads, key_heads


def _headless(query_size: int, key_size: int, layout: str, heads: int | None) -> tuple[int, int]:
    if not heads or not query_size or query_size % heads:
        raise ValueError(f"layout {layout} needs a num_heads that divides {query_size}, given {heads}")
    size = query_size // heads
    if key_size % size:
        raise ValueError(f"keys of size {key_size} cannot be split into heads of size {size}")
    return heads, key_size // size


def check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: str, heads: int, key_heads: int) -> None:
    """Check that query, key and value have the same dtype and compatible shapes.

    Args:
        query, key, value: in ``layout``; ``value`` may have another head size.
        layout: one of ``layouts.LAYOUTS``.
        heads, key_heads: numbers of query heads and of key heads, as ``head_counts`` returns them.

    Raises:
        ValueError: dtypes, dimensions, batches or head sizes differ, or keys and values do not match.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if value.dim() != key.dim():
        raise ValueError(
            f"key and value have different numbers of dimensions: {tuple(key.shape)}, {tuple(value.shape)}"
        )
    q = bnsd_shape(query.shape, layout, heads)
    k, v = (bnsd_shape(t.shape, layout, key_heads) for t in (key, value))
    if q[0] != k[0] or q[3] != k[3] or k[:3] != v[:3]:
        raise ValueError(f"the shapes do not match, as [b, n, s, d]: {q}, {k}, {v}")


def check_limits(window: Window, mask: Tensor | None, dropout_p: float) -> None:
    """Raise a ValueError for a negative window, a non-boolean mask, or a probability outside [0, 1)."""
    if any(limit is not None and limit < 0 for limit in window):
        raise ValueError(f"window must not be negative (None means no limit), given {window}")
    if mask is not None and (mask.dtype is not torch.bool or mask.dim() > 4):
        raise ValueError(f"mask must be boolean with at most 4 dimensions, given {mask.dtype} {mask.shape}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), given {dropout_p}")


def check_sink(sink: Tensor | None, heads: int) -> None:
    """Raise a ValueError if the sink does not hold one value per query head."""
    if sink is not None and tuple(sink.shape) != (heads,):
        raise ValueError(
            f"sink must have the shape ({heads},), one score per head, given {tuple(sink.shape)}"
        )


def check_packed(packed: PackedSequences | None, layout: str, mask: Tensor | None) -> None:
    """Raise a ValueError if TND is used without ``packed``, or ``packed`` is combined with another mask."""
    if packed is None:
        if layout == "TND":
            raise ValueError("layout TND needs packed, which gives the lengths of its sequences")
        return
    if mask is not None:
        raise ValueError("mask must be None for packed sequences, whose lengths define what is visible")
    if len(packed.query_lengths) != len(packed.key_lengths):
        raise ValueError(
            f"packed has {len(packed.query_lengths)} query lengths but {len(packed.key_lengths)} key lengths"
        )


def check_lengths(packed: PackedSequences, queries: int, keys: int) -> None:
    """Raise a ValueError if the sequences do not cover the tokens."""
    if min((*packed.query_lengths, *packed.key_lengths), default=0) < 0:
        raise ValueError("packed contains a negative length")
    if sum(packed.query_lengths) != queries or sum(packed.key_lengths) != keys:
        raise ValueError(
            f"packed describes {sum(packed.query_lengths)} queries and {sum(packed.key_lengths)} keys, but "
            f"the tensors have {queries} and {keys}"
        )
