"""Convert between the layouts of attention operations, and compute which pairs a sparse mode masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

DENSE_DIMENSIONS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4}
DIMENSIONS = {**DENSE_DIMENSIONS, "TND": 3}
COMPRESSED_MASK = (2048, 2048)  # sparse modes 2, 3, 4: a triangle of this size, whatever the sequence length
PREFIX_MASK = (3072, 2048)  # sparse mode 6: the triangle above a rectangle for the prefix
STATISTICS_WIDTH = 8  # maximum and sum of the softmax come back eight times


@dataclass(frozen=True)
class Sizes:
    """The sizes of the tensors in an attention call.

    With layout TND, ``queries`` and ``keys`` are totals over the sequences.

    Attributes:
        batch: b, or the number of sequences.
        heads: the number of heads of the query.
        kv_heads: the number of heads of key and value.
        queries: sq.
        keys: skv.
        size: d of query and key.
        value_size: d of value and output.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int


def sizes(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, lengths: Sequence[int] | None
) -> Sizes:
    """Determine the sizes of an attention call from its tensors and their layout.

    Args:
        lengths: the cumulative lengths for TND, otherwise None.
    """
    if layout in ("BSH", "SBH"):
        sequence, batch = (1, 0) if layout == "BSH" else (0, 1)
        size = query.size(2) // head_num
        kv_heads = max(1, key.size(2) // max(1, size))
        return Sizes(
            query.size(batch),
            head_num,
            kv_heads,
            query.size(sequence),
            key.size(sequence),
            size,
            value.size(2) // kv_heads,
        )
    head, sequence = {"BNSD": (1, 2), "BSND": (2, 1), "TND": (1, 0)}[layout]
    batch = len(lengths or ()) if layout == "TND" else query.size(0)
    return Sizes(
        batch,
        query.size(head),
        key.size(head),
        query.size(sequence),
        key.size(sequence),
        query.size(-1),
        value.size(-1),
    )


def to_bnsd(x: Tensor, layout: str, heads: int) -> Tensor:
    """Return a tensor in a dense layout as ``[b, n, s, d]``."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = x.unflatten(2, (heads, -1))
    return split.permute(0, 2, 1, 3) if layout == "BSH" else split.permute(1, 2, 0, 3)


def from_bnsd(x: Tensor, layout: str) -> Tensor:
    """Return a tensor ``[b, n, s, d]`` as a contiguous tensor in a dense layout."""
    if layout == "BNSD":
        return x.contiguous()
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    order = (0, 2, 1, 3) if layout == "BSH" else (2, 0, 1, 3)
    return x.permute(order).flatten(2).contiguous()


def used(ends: Sequence[int]) -> list[int]:
    """Return the cumulative ends of sequences without trailing zeros, which represent omitted sequences."""
    count = len(ends)
    while count and ends[count - 1] == 0:
        count -= 1
    return list(ends[:count])


def spans(ends: Sequence[int]) -> list[slice]:
    """Return the rows of each sequence that is not omitted, given the cumulative ends of the sequences."""
    return [slice(start, end) for start, end in pairwise([0, *used(ends)])]


def distance(queries: int, keys: int) -> Tensor:
    """Return the position of each key minus the position of each query, both counted from 0.

    The shape is ``[queries, keys]``.
    """
    return torch.arange(keys) - torch.arange(queries).unsqueeze(1)


def outside_band(queries: int, keys: int, before: int, after: int, anchor: int = 0) -> Tensor:
    """Return a mask of the keys that are more than ``before`` positions behind their query or ``after`` ahead
    of it.

    Args:
        anchor: the position of the first query among the keys: with 0, positions are counted from the top
            left corner, with keys - queries from the bottom right corner.
    """
    ahead = distance(queries, keys) - anchor
    return (ahead > after) | (ahead < -before)


def prefix_forbidden(queries: int, keys: int, prefix: Sequence[int]) -> Tensor:
    """Return a mask ``[b, 1, queries, keys]`` that is True above the bottom-right diagonal and outside
    the prefix.
    """
    later = distance(queries, keys) > keys - queries
    beyond = torch.arange(keys) >= torch.tensor(list(prefix)).view(-1, 1, 1, 1)
    return later & beyond


def forbidden(
    mode: int,
    queries: int,
    keys: int,
    mask: Tensor | None,
    before: int,
    after: int,
    prefix: Sequence[int] | None,
) -> Tensor | None:
    """Return a mask that broadcasts to ``[b, n, queries, keys]`` and is True for masked pairs, or None if
    there are none.

    In modes 0, 1 and 5, the given mask alone decides (the limits require that it covers everything outside
    the band). A two-dimensional mask for several sequences starts at the top left corner of each sequence.
    """
    if mask is None:
        return None
    corner = keys - queries
    if mode in (0, 1, 5):
        return mask.bool()[..., :queries, :keys]
    if mode == 2:
        return distance(queries, keys) > 0
    if mode == 3:
        return distance(queries, keys) > corner
    if mode == 4:
        return outside_band(queries, keys, before, after, corner)
    return prefix_forbidden(queries, keys, prefix or ())


def pack_statistics(rows: Sequence[Tensor], softmax_layout: str) -> Tensor:
    """Join the statistics ``[n, s, 8]`` of sequences in layout TND into ``[t, n, 8]``, the device's format.

    Unless ``softmax_layout`` is TND, the device writes each sequence as ``[n, s, 8]``, so the memory of the
    tensor with shape ``[t, n, 8]`` is ordered by head within each sequence.
    """
    heads = rows[0].size(0)
    ordered = [row.transpose(0, 1) if softmax_layout == "TND" else row for row in rows]
    return torch.cat([row.reshape(-1, STATISTICS_WIDTH) for row in ordered]).view(-1, heads, STATISTICS_WIDTH)


def unpack_statistics(packed: Tensor, rows: Sequence[slice], softmax_layout: str) -> list[Tensor]:
    """Split the result of ``pack_statistics`` into the statistics ``[n, s, 8]`` of each sequence."""
    heads = packed.size(1)
    flat = packed.reshape(-1, STATISTICS_WIDTH)
    unpacked = []
    for row in rows:
        part = flat[row.start * heads : row.stop * heads]
        if softmax_layout == "TND":
            unpacked.append(part.view(-1, heads, STATISTICS_WIDTH).transpose(0, 1))
        else:
            unpacked.append(part.view(heads, -1, STATISTICS_WIDTH))
    return unpacked
