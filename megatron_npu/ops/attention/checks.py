"""Check that the arguments of ``attention`` are consistent with each other and with the shapes of the
tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.attention.layouts import HEADLESS, LAYOUTS, bnsd_shape
from megatron_npu.ops.attention.spec import PackedSequences, Window


def head_counts(query: Tensor, key: Tensor, layout: str, num_heads: int | None) -> tuple[int, int]:
    """Return the number of query heads and the number of key heads.

    Args:
        query, key: tensors in ``layout``.
        layout: one of ``layouts.LAYOUTS``.
        num_heads: the number of query heads; required for layouts that merge heads and head size.

    Raises:
        ValueError: the layout is unknown, the number of dimensions is wrong, or the number of key heads does
            not divide the number of query heads.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    dimensions = 3 if layout in HEADLESS or layout == "TND" else 4
    for tensor in (query, key):
        if tensor.dim() != dimensions:
            raise ValueError(
                f"layout {layout} requires {dimensions} dimensions, but got a tensor of shape "
                f"{tuple(tensor.shape)}"
            )
    if layout in HEADLESS:
        heads, key_heads = _headless(query.size(-1), key.size(-1), layout, num_heads)
    else:
        place = 1 if layout in ("BNSD", "TND") else 2
        heads, key_heads = query.size(place), key.size(place)
    if not key_heads or heads % key_heads:
        raise ValueError(
            f"the number of query heads ({heads}) must be a multiple of the number of key heads ({key_heads})"
        )
    return heads, key_heads


def _headless(query_size: int, key_size: int, layout: str, heads: int | None) -> tuple[int, int]:
    if not heads or not query_size or query_size % heads:
        raise ValueError(
            f"layout {layout} requires num_heads to be a divisor of {query_size}, but got {heads}"
        )
    size = query_size // heads
    if key_size % size:
        raise ValueError(f"keys of size {key_size} cannot be split into heads of size {size}")
    return heads, key_size // size


def check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: str, heads: int, key_heads: int) -> None:
    """Check that query, key and value have compatible shapes and the same dtype.

    Args:
        query, key, value: tensors in ``layout``; ``value`` may have another head size.
        layout: one of ``layouts.LAYOUTS``.
        heads, key_heads: the numbers of query heads and of key heads, as returned by ``head_counts``.

    Raises:
        ValueError: dtypes, dimensions, batches or head sizes differ, or keys and values do not match.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have the same dtype, but got {query.dtype}, {key.dtype} and "
            f"{value.dtype}"
        )
    if value.dim() != key.dim():
        raise ValueError(
            f"key and value must have the same number of dimensions, but got shapes {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    q = bnsd_shape(query.shape, layout, heads)
    k, v = (bnsd_shape(t.shape, layout, key_heads) for t in (key, value))
    if q[0] != k[0] or q[3] != k[3] or k[:3] != v[:3]:
        raise ValueError(
            f"the shapes of query, key and value do not match; as [b, n, s, d] they are {q}, {k} and {v}"
        )


def check_limits(window: Window, mask: Tensor | None, dropout_p: float) -> None:
    """Check the window, the mask and the dropout probability of an attention call.

    Raises:
        ValueError: the window is negative, the mask is not boolean, or the probability is not in [0, 1).
    """
    if any(limit is not None and limit < 0 for limit in window):
        raise ValueError(f"window must not be negative (None means no limit), but got {window}")
    if mask is not None and (mask.dtype is not torch.bool or mask.dim() > 4):
        raise ValueError(
            f"mask must be boolean and have at most 4 dimensions, but got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), but got {dropout_p}")


def check_sink(sink: Tensor | None, heads: int) -> None:
    """Check that the attention sink has one value per query head.

    Raises:
        ValueError: it has another number of values.
    """
    if sink is not None and tuple(sink.shape) != (heads,):
        raise ValueError(
            f"sink must have the shape ({heads},), one score per head, but got {tuple(sink.shape)}"
        )


def check_packed(packed: PackedSequences | None, layout: str, mask: Tensor | None) -> None:
    """Check that ``packed`` is given with layout TND, and that it is not combined with another mask.

    Raises:
        ValueError: one of these is not the case.
    """
    if packed is None:
        if layout == "TND":
            raise ValueError(
                "layout TND requires the argument packed, which gives the lengths of the sequences"
            )
        return
    if mask is not None:
        raise ValueError(
            "mask must be None for packed sequences, whose lengths define which keys are visible"
        )
    if len(packed.query_lengths) != len(packed.key_lengths):
        raise ValueError(
            f"packed must have as many query lengths as key lengths, but got {len(packed.query_lengths)} "
            f"and {len(packed.key_lengths)}"
        )


def check_lengths(packed: PackedSequences, queries: int, keys: int) -> None:
    """Check that the lengths of the packed sequences add up to the number of tokens.

    Raises:
        ValueError: a length is negative, or the lengths do not sum up to the numbers of tokens.
    """
    if min((*packed.query_lengths, *packed.key_lengths), default=0) < 0:
        raise ValueError("the lengths in packed must not be negative")
    if sum(packed.query_lengths) != queries or sum(packed.key_lengths) != keys:
        raise ValueError(
            f"packed describes {sum(packed.query_lengths)} queries and {sum(packed.key_lengths)} keys, but "
            f"the tensors have {queries} and {keys}"
        )
