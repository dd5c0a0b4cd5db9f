"""Define conditions on the arguments of npu_fusion_attention, which its table of limits uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_npu.sim.kernels.attention import layouts
from megatron_npu.sim.kernels.limits.common import not_decreasing

SEQUENCES = 2048  # of TND
COMPRESSED_MODES = (2, 3, 4)
ALIBI_ROWS = 1024  # position biases of longer sequences may be given by their last rows

Condition = Callable[[SimpleNamespace], bool]


def layout_of(a: SimpleNamespace) -> str:
    return a.input_layout.upper()


def _ends(value: object) -> list[int]:
    """Return cumulative lengths from a list or a tensor as a list, or an empty list for None."""
    return [] if value is None else [int(end) for end in value]  # type: ignore[attr-defined]


def sizes_of(a: SimpleNamespace) -> layouts.Sizes:
    return layouts.sizes(a.query, a.key, a.value, a.head_num, layout_of(a), _ends(a.actual_seq_qlen))


def of_sizes(condition: Callable[[layouts.Sizes], bool]) -> Condition:
    return lambda a: condition(sizes_of(a))


def blocks_of(a: SimpleNamespace) -> list[tuple[int, int]]:
    """Return a pair (number of queries, number of keys) for every sequence.

    For a dense layout, one entry covers the whole batch.
    """
    sizes = sizes_of(a)
    if layout_of(a) != "TND":
        return [(sizes.queries, sizes.keys)]
    query, key = (layouts.spans(_ends(x)) for x in (a.actual_seq_qlen, a.actual_seq_kvlen))
    return [(q.stop - q.start, k.stop - k.start) for q, k in zip(query, key, strict=True)]


def weights_of_a_head(a: SimpleNamespace) -> int:
    """Return the number of attention weights of one head over the whole batch."""
    batch = 1 if layout_of(a) == "TND" else sizes_of(a).batch
    return batch * sum(queries * keys for queries, keys in blocks_of(a))


def same_batch_and_sequence(a: SimpleNamespace) -> bool:
    layout = layout_of(a)
    if layout == "TND":
        return a.key.shape[:2] == a.value.shape[:2]
    batch = 1 if layout == "SBH" else 0
    fits = a.query.size(batch) == a.key.size(batch) == a.value.size(batch)
    return fits and a.key.shape[:-1] == a.value.shape[:-1]


def head_count(a: SimpleNamespace) -> bool:
    """Return True if head_num equals the number of query heads, or divides the query's last dimension."""
    layout = layout_of(a)
    if layout in ("BSH", "SBH"):
        size = a.query.size(2) // a.head_num
        return a.query.size(2) % a.head_num == 0 and size > 0 and a.key.size(2) % size == 0
    return a.query.size({"BNSD": 1, "BSND": 2, "TND": 1}[layout]) == a.head_num


def head_sizes(a: SimpleNamespace) -> bool:
    sizes = sizes_of(a)
    if layout_of(a) in ("BSH", "SBH"):
        return a.value.size(2) % sizes.kv_heads == 0
    return a.query.size(-1) == a.key.size(-1)


def has_the_layouts_dimensions(argument: str, a: SimpleNamespace) -> bool:
    return getattr(a, argument).dim() == layouts.DIMENSIONS[layout_of(a)]


def has_sequences(argument: str, a: SimpleNamespace) -> bool:
    return layout_of(a) != "TND" or bool(_ends(getattr(a, argument)))


def has_not_too_many_sequences(argument: str, a: SimpleNamespace) -> bool:
    return layout_of(a) != "TND" or len(_ends(getattr(a, argument))) <= SEQUENCES


def is_cumulative(argument: str, tokens: str) -> Condition:
    """Require cumulative ends that never decrease and that reach the number of tokens.

    Trailing zeros may omit sequences.
    """

    def holds(a: SimpleNamespace) -> bool:
        if layout_of(a) != "TND":
            return True
        ends = _ends(getattr(a, argument))
        used = layouts.used(ends)
        rising = not_decreasing(used)
        total = getattr(a, tokens).size(0)
        reaches = used[-1:] == [total] if len(used) == len(ends) else 0 < max(used, default=0) <= total
        return rising and reaches

    return holds


def holds_band(negative: str, other: str, side: int) -> Condition:
    """Require that a negative limit of the band, if there is one, is valid.

    A negative limit must be smaller than the sequence, and the other limit must be at least as large.

    Args:
        side: which of (queries, keys) is the sequence for ``negative``.
    """

    def holds(a: SimpleNamespace) -> bool:
        size = -getattr(a, negative)
        if a.atten_mask is None or a.sparse_mode not in (0, 4) or size <= 0:
            return True
        return getattr(a, other) >= size and all(size < block[side] for block in blocks_of(a))

    return holds


def mask_covers_band(before: str, after: str) -> Condition:
    """Require that the mask hides all keys outside the band, because sparse mode 0 does not compute them."""

    def holds(a: SimpleNamespace) -> bool:
        if a.sparse_mode != 0:
            return True
        return all(
            bool(_corner(a.atten_mask, *block)[..., outside].all())
            for block in blocks_of(a)
            for outside in [layouts.outside_band(*block, getattr(a, before), getattr(a, after))]
            if outside.any()
        )

    return holds


def _corner(mask: Tensor, queries: int, keys: int) -> Tensor:
    return mask.bool()[..., :queries, :keys]


def mask_covers_prefix(a: SimpleNamespace) -> bool:
    if a.sparse_mode != 5:
        return True
    sizes = sizes_of(a)
    outside = layouts.prefix_forbidden(sizes.queries, sizes.keys, a.prefix)
    return bool((a.atten_mask.bool() == outside).all())


def mask_shape(a: SimpleNamespace) -> bool:
    """Require a full mask of shape [b or 1, n or 1, sq, skv] or [sq, skv], or a compressed mask of fixed
    size.
    """
    shape, sizes = tuple(a.atten_mask.shape), sizes_of(a)
    if a.sparse_mode in COMPRESSED_MODES:
        return shape == layouts.COMPRESSED_MASK
    if a.sparse_mode == 6:
        return shape == layouts.PREFIX_MASK
    if layout_of(a) == "TND":
        blocks = blocks_of(a)
        return shape == (max(q for q, _ in blocks), max(k for _, k in blocks))
    pair = (sizes.queries, sizes.keys)
    full = [(sizes.batch, sizes.heads, *pair), (sizes.batch, 1, *pair)]
    return shape in full if a.sparse_mode == 5 else shape in [*full, (1, 1, *pair), pair]


def compressed_content(a: SimpleNamespace) -> bool:
    if a.sparse_mode in COMPRESSED_MODES:
        return _same_mask(a.atten_mask, _triangle())
    return a.sparse_mode != 6 or _same_mask(a.atten_mask, _triangle_and_rectangle())


def _same_mask(mask: Tensor, wanted: Tensor) -> bool:
    """Return True if two masks are equal, comparing eight elements at a time for speed."""
    words = mask.contiguous().view(torch.int64)
    return torch.equal(words, wanted.view(torch.int64)) or torch.equal(mask.bool(), wanted)


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    return torch.ones(layouts.COMPRESSED_MASK, dtype=torch.bool).triu_(1)


@lru_cache(maxsize=1)
def _triangle_and_rectangle() -> Tensor:
    rows, columns = layouts.PREFIX_MASK
    rectangle = torch.zeros(rows - columns, columns, dtype=torch.bool)
    rectangle[:, columns // 2 :] = True
    return torch.cat([_triangle(), rectangle])


def no_blind_row(a: SimpleNamespace) -> bool:
    if layout_of(a) != "TND" or a.sparse_mode not in (0, 1):
        return True
    return all(not bool(_corner(a.atten_mask, *block).all(-1).any()) for block in blocks_of(a) if all(block))


def prefix_values(a: SimpleNamespace) -> bool:
    blocks = blocks_of(a)
    pairs = blocks if layout_of(a) == "TND" else blocks * len(a.prefix)
    return all(
        max(0, keys - queries) <= n <= keys for n, (queries, keys) in zip(a.prefix, pairs, strict=True)
    )


def bias_shape(a: SimpleNamespace) -> bool:
    sizes, shape = sizes_of(a), tuple(a.pse.shape)
    pair = (sizes.queries, sizes.keys)
    return shape in [
        (sizes.batch, sizes.heads, *pair),
        (sizes.batch, sizes.heads, 1, sizes.keys),
        (1, sizes.heads, *pair),
    ]


def bias_is_compressed(a: SimpleNamespace) -> bool:
    sizes, shape = sizes_of(a), tuple(a.pse.shape)
    rows = (sizes.heads, ALIBI_ROWS, sizes.keys)
    return sizes.queries > ALIBI_ROWS and shape in [(sizes.batch, *rows), (1, *rows)]


def same_count(counted: Callable[[list[int]], list[int]], a: SimpleNamespace) -> bool:
    query, key = (counted(_ends(ends)) for ends in (a.actual_seq_qlen, a.actual_seq_kvlen))
    return layout_of(a) != "TND" or len(query) == len(key)


def statistics_shape(argument: str, a: SimpleNamespace) -> bool:
    sizes = sizes_of(a)
    width = layouts.STATISTICS_WIDTH
    if layout_of(a) == "TND":
        return tuple(getattr(a, argument).shape) == (sizes.queries, sizes.heads, width)
    return tuple(getattr(a, argument).shape) == (sizes.batch, sizes.heads, sizes.queries, width)
