"""The limits of npu_fusion_attention and its gradient in their three versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_npu.sim.kernels import layouts
from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    absent,
    between,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
    required,
    shape_of,
)
from megatron_npu.sim.kernels.limits.common import FLOATS, not_decreasing

HEADS = 256
HEAD_SIZE = 768
SEQUENCE = 1 << 20  # "1M", also of the total of TND
BATCH = 2 << 20  # "2M"
SEQUENCES = 2048  # of TND
PREFIX_BATCH = 32
MASKLESS_MODE = 0
PREFIX_MODES = (5, 6)
COMPRESSED_MODES = (2, 3, 4)
DENSE_MODES = range(7)
VARIABLE_MODES = (0, 1, 2, 3, 4, 6, 7, 8)
SIMULATED_MODES = range(7)
ALIBI_ROWS = 1024  # position biases of longer sequences may be given by their last rows

Condition = Callable[[SimpleNamespace], bool]


def _layout(a: SimpleNamespace) -> str:
    return a.input_layout.upper()


def _ends(value: object) -> list[int]:
    """Return cumulative lengths, a list or (third version) a tensor, as a list; none as an empty one."""
    return [] if value is None else [int(end) for end in value]  # type: ignore[attr-defined]


def _sizes(a: SimpleNamespace) -> layouts.Sizes:
    return layouts.sizes(a.query, a.key, a.value, a.head_num, _layout(a), _ends(a.actual_seq_qlen))


def _of_sizes(condition: Callable[[layouts.Sizes], bool]) -> Condition:
    return lambda a: condition(_sizes(a))


def _blocks(a: SimpleNamespace) -> list[tuple[int, int]]:
    """Return (queries, keys) of every sequence: of the whole batch at once in a dense layout."""
    sizes = _sizes(a)
    if _layout(a) != "TND":
        return [(sizes.queries, sizes.keys)]
    query, key = (layouts.spans(_ends(x)) for x in (a.actual_seq_qlen, a.actual_seq_kvlen))
    return [(q.stop - q.start, k.stop - k.start) for q, k in zip(query, key, strict=True)]


def _weights_of_a_head(a: SimpleNamespace) -> int:
    """Return the number of attention weights of one head over the whole batch."""
    batch = 1 if _layout(a) == "TND" else _sizes(a).batch
    return batch * sum(queries * keys for queries, keys in _blocks(a))


def _same_batch_and_sequence(a: SimpleNamespace) -> bool:
    layout = _layout(a)
    if layout == "TND":
        return a.key.shape[:2] == a.value.shape[:2]
    batch = 1 if layout == "SBH" else 0
    fits = a.query.size(batch) == a.key.size(batch) == a.value.size(batch)
    return fits and a.key.shape[:-1] == a.value.shape[:-1]


def _head_count(a: SimpleNamespace) -> bool:
    """Tell whether head_num is the query's head count, or divides its last dimension."""
    layout = _layout(a)
    if layout in ("BSH", "SBH"):
        size = a.query.size(2) // a.head_num
        return a.query.size(2) % a.head_num == 0 and size > 0 and a.key.size(2) % size == 0
    return a.query.size({"BNSD": 1, "BSND": 2, "TND": 1}[layout]) == a.head_num


def _head_sizes(a: SimpleNamespace) -> bool:
    sizes = _sizes(a)
    if _layout(a) in ("BSH", "SBH"):
        return a.value.size(2) % sizes.kv_heads == 0
    return a.query.size(-1) == a.key.size(-1)


def _has_the_layouts_dimensions(argument: str, a: SimpleNamespace) -> bool:
    return getattr(a, argument).dim() == layouts.DIMENSIONS[_layout(a)]


def _has_sequences(argument: str, a: SimpleNamespace) -> bool:
    return _layout(a) != "TND" or bool(_ends(getattr(a, argument)))


def _has_not_too_many_sequences(argument: str, a: SimpleNamespace) -> bool:
    return _layout(a) != "TND" or len(_ends(getattr(a, argument))) <= SEQUENCES


def _cumulative(argument: str, tokens: str) -> Condition:
    """Ends do not fall and reach the number of tokens, unless trailing zeros leave sequences out."""

    def holds(a: SimpleNamespace) -> bool:
        if _layout(a) != "TND":
            return True
        ends = _ends(getattr(a, argument))
        used = layouts.used(ends)
        rising = not_decreasing(used)
        total = getattr(a, tokens).size(0)
        reaches = used[-1:] == [total] if len(used) == len(ends) else 0 < max(used, default=0) <= total
        return rising and reaches

    return holds


def _band(negative: str, other: str, side: int) -> Condition:
    """A negative limit of the band needs the other of at least its size and be smaller than the sequence.

    Args:
        side: which of (queries, keys) is the sequence of ``negative``.
    """

    def holds(a: SimpleNamespace) -> bool:
        size = -getattr(a, negative)
        if a.atten_mask is None or a.sparse_mode not in (0, 4) or size <= 0:
            return True
        return getattr(a, other) >= size and all(size < block[side] for block in _blocks(a))

    return holds


def _mask_covers_band(before: str, after: str) -> Condition:
    """In mode 0 the device skips what lies outside the band; the mask must agree."""

    def holds(a: SimpleNamespace) -> bool:
        if a.sparse_mode != 0:
            return True
        return all(
            bool(_corner(a.atten_mask, *block)[..., outside].all())
            for block in _blocks(a)
            for outside in [layouts.outside_band(*block, getattr(a, before), getattr(a, after))]
            if outside.any()
        )

    return holds


def _corner(mask: Tensor, queries: int, keys: int) -> Tensor:
    return mask.bool()[..., :queries, :keys]


def _mask_covers_prefix(a: SimpleNamespace) -> bool:
    if a.sparse_mode != 5:
        return True
    sizes = _sizes(a)
    outside = layouts.prefix_forbidden(sizes.queries, sizes.keys, a.prefix)
    return bool((a.atten_mask.bool() == outside).all())


def _mask_shape(a: SimpleNamespace) -> bool:
    """Full masks: [b or 1, n or 1, sq, skv] or [sq, skv]; compressed ones have one size."""
    shape, sizes = tuple(a.atten_mask.shape), _sizes(a)
    if a.sparse_mode in COMPRESSED_MODES:
        return shape == layouts.COMPRESSED_MASK
    if a.sparse_mode == 6:
        return shape == layouts.PREFIX_MASK
    if _layout(a) == "TND":
        blocks = _blocks(a)
        return shape == (max(q for q, _ in blocks), max(k for _, k in blocks))
    pair = (sizes.queries, sizes.keys)
    full = [(sizes.batch, sizes.heads, *pair), (sizes.batch, 1, *pair)]
    return shape in full if a.sparse_mode == 5 else shape in [*full, (1, 1, *pair), pair]


def _compressed_content(a: SimpleNamespace) -> bool:
    if a.sparse_mode in COMPRESSED_MODES:
        return _same_mask(a.atten_mask, _triangle())
    return a.sparse_mode != 6 or _same_mask(a.atten_mask, _triangle_and_rectangle())


def _same_mask(mask: Tensor, wanted: Tensor) -> bool:
    """Compare eight elements at a time first: this runs at every call of every layer."""
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


def _no_blind_row(a: SimpleNamespace) -> bool:
    if _layout(a) != "TND" or a.sparse_mode not in (0, 1):
        return True
    return all(not bool(_corner(a.atten_mask, *block).all(-1).any()) for block in _blocks(a) if all(block))


def _prefix_values(a: SimpleNamespace) -> bool:
    blocks = _blocks(a)
    pairs = blocks if _layout(a) == "TND" else blocks * len(a.prefix)
    return all(
        max(0, keys - queries) <= n <= keys for n, (queries, keys) in zip(a.prefix, pairs, strict=True)
    )


def _bias_shape(a: SimpleNamespace) -> bool:
    sizes, shape = _sizes(a), tuple(a.pse.shape)
    pair = (sizes.queries, sizes.keys)
    return shape in [
        (sizes.batch, sizes.heads, *pair),
        (sizes.batch, sizes.heads, 1, sizes.keys),
        (1, sizes.heads, *pair),
    ]


def _bias_is_compressed(a: SimpleNamespace) -> bool:
    sizes, shape = _sizes(a), tuple(a.pse.shape)
    rows = (sizes.heads, ALIBI_ROWS, sizes.keys)
    return sizes.queries > ALIBI_ROWS and shape in [(sizes.batch, *rows), (1, *rows)]


def _shared(before: str, after: str) -> tuple[Limit, ...]:
    """The limits of forward and backward; ``before`` and ``after`` are the names of the band's arguments."""
    tensors = ("query", "key", "value")
    return (
        Limit(
            "input_layout",
            "BSH, SBH, BSND, BNSD or TND (in any case)",
            lambda a: _layout(a) in layouts.DIMENSIONS,
        ),
        between("head_num", 1, HEADS),
        *(
            Limit(
                name,
                "3 dimensions in layouts BSH, SBH and TND, 4 in BSND and BNSD",
                partial(_has_the_layouts_dimensions, name),
            )
            for name in tensors
        ),
        dtype("query", *FLOATS),
        dtype_of("key", "query"),
        dtype_of("value", "query"),
        Limit(
            "head_num",
            "the heads of query (BSND, BNSD, TND) or a divisor of its last dimension (BSH, SBH) that gives a "
            "head size which divides the last dimension of key",
            _head_count,
        ),
        Limit("key", "the batch of query, and value the same sequence and heads", _same_batch_and_sequence),
        Limit("key", "the head size of query", _head_sizes),
        Limit("query", f"head sizes from 1 to {HEAD_SIZE}", _of_sizes(lambda s: 1 <= s.size <= HEAD_SIZE)),
        Limit("value", "a head size from 1 to that of key", _of_sizes(lambda s: 1 <= s.value_size <= s.size)),
        Limit(
            "key",
            "a number of heads that divides that of query",
            _of_sizes(lambda s: s.kv_heads > 0 and s.heads % s.kv_heads == 0),
        ),
        Limit(
            "query",
            f"sequences of 1 to {SEQUENCE} tokens",
            _of_sizes(lambda s: 1 <= s.queries <= SEQUENCE and 1 <= s.keys <= SEQUENCE),
        ),
        Limit(
            "query",
            f"a batch of 1 to {BATCH}",
            lambda a: _layout(a) == "TND" or 1 <= _sizes(a).batch <= BATCH,
        ),
        Limit("keep_prob", "above 0 and up to 1", lambda a: 0 < a.keep_prob <= 1),
        one_of("inner_precise", 0, 1, 2),
        one_of("softmax_layout", "", "TND"),
        Limit(
            "softmax_layout",
            "TND only with input_layout TND",
            lambda a: not a.softmax_layout or _layout(a) == "TND",
        ),
        absent("padding_mask"),
        *_lengths(),
        *_modes(),
        *_masks(before, after),
        *_prefix(),
        *_bias(),
        dtype("sink", torch.float32),
        Limit("sink", "[head_num]", lambda a: tuple(a.sink.shape) == (a.head_num,)),
    )


def _lengths() -> tuple[Limit, ...]:
    names = ("actual_seq_qlen", "actual_seq_kvlen")
    return (
        *(
            Limit(
                name,
                "cumulative lengths in layout TND",
                partial(_has_sequences, name),
                even_none=True,
            )
            for name in names
        ),
        *(
            Limit(
                name,
                f"1 to {SEQUENCES} entries",
                partial(_has_not_too_many_sequences, name),
            )
            for name in names
        ),
        Limit("actual_seq_kvlen", "as many entries as actual_seq_qlen", partial(_same_count, list)),
        *(
            Limit(
                name,
                f"ends that do not fall and reach all tokens of {tokens}; final zeros leave sequences out",
                _cumulative(name, tokens),
            )
            for name, tokens in zip(names, ("query", "key"), strict=True)
        ),
        Limit(
            "actual_seq_kvlen",
            "the sequences of actual_seq_qlen left out",
            partial(_same_count, layouts.used),
        ),
    )


def _same_count(counted: Callable[[list[int]], list[int]], a: SimpleNamespace) -> bool:
    query, key = (counted(_ends(ends)) for ends in (a.actual_seq_qlen, a.actual_seq_kvlen))
    return _layout(a) != "TND" or len(query) == len(key)


def _modes() -> tuple[Limit, ...]:
    return (
        Limit(
            "sparse_mode",
            "0 to 6, in layout TND 0 to 4 and 6 to 8",
            lambda a: a.sparse_mode in (VARIABLE_MODES if _layout(a) == "TND" else DENSE_MODES),
        ),
        Limit("sparse_mode", "0 to 6", lambda a: a.sparse_mode in SIMULATED_MODES, simulated=False),
        Limit(
            "atten_mask",
            "the mask that belongs to a sparse_mode above 0; without it the device attends to everything",
            lambda a: a.sparse_mode == MASKLESS_MODE or a.atten_mask is not None,
            even_none=True,
        ),
    )


def _masks(before: str, after: str) -> tuple[Limit, ...]:
    return (
        dtype("atten_mask", torch.bool, torch.uint8),
        Limit(
            "atten_mask",
            "[b, n, sq, skv], [b, 1, sq, skv], [1, 1, sq, skv] or [sq, skv]; [max sq, max skv] in layout TND;"
            " [2048, 2048] in sparse_mode 2, 3 and 4; the first two in 5; [3072, 2048] in 6",
            _mask_shape,
        ),
        Limit(
            "atten_mask",
            "ones above the diagonal in sparse_mode 2, 3 and 4, with half a rectangle of ones below in 6",
            _compressed_content,
        ),
        Limit("atten_mask", "no row of ones only in layout TND", _no_blind_row),
        *(
            Limit(
                name,
                f"negative in sparse_mode 0 and 4 only with {other} of its size or more, and above -{length}",
                _band(name, other, side),
            )
            for name, other, side, length in ((before, after, 0, "sq"), (after, before, 1, "skv"))
        ),
        Limit(
            "atten_mask",
            f"ones outside the band of {before} and {after} in sparse_mode 0",
            _mask_covers_band(before, after),
        ),
    )


def _prefix() -> tuple[Limit, ...]:
    return (
        Limit(
            "prefix",
            "a value in sparse_mode 5 and 6",
            lambda a: a.sparse_mode not in PREFIX_MODES or a.prefix is not None,
            even_none=True,
        ),
        Limit(
            "prefix",
            f"one entry per batch, up to {PREFIX_BATCH}",
            lambda a: (
                a.sparse_mode not in PREFIX_MODES
                or (len(a.prefix) == _sizes(a).batch and len(a.prefix) <= PREFIX_BATCH)
            ),
        ),
        Limit(
            "prefix",
            "0 to skv, or skv - sq to skv where sq is at most skv",
            lambda a: a.sparse_mode not in PREFIX_MODES or _prefix_values(a),
        ),
        Limit("atten_mask", "the prefix and the causal triangle in sparse_mode 5", _mask_covers_prefix),
    )


def _bias() -> tuple[Limit, ...]:
    return (
        dtype_of("pse", "query"),
        Limit("pse", "None in layout TND", lambda a: _layout(a) != "TND", simulated=False),
        Limit("pse", "biases of all rows", lambda a: not _bias_is_compressed(a), simulated=False),
        Limit("pse", "[b, n, sq, skv], [b, n, 1, skv] or [1, n, sq, skv]", _bias_shape),
    )


def _statistics_shape(argument: str, a: SimpleNamespace) -> bool:
    sizes = _sizes(a)
    width = layouts.STATISTICS_WIDTH
    if _layout(a) == "TND":
        return tuple(getattr(a, argument).shape) == (sizes.queries, sizes.heads, width)
    return tuple(getattr(a, argument).shape) == (sizes.batch, sizes.heads, sizes.queries, width)


def _gradient() -> tuple[Limit, ...]:
    names = ("softmax_max", "softmax_sum")
    return (
        *(required(name) for name in (*names, "attention_in")),
        *(dtype(name, torch.float32) for name in names),
        *(
            Limit(name, "[b, n, sq, 8], [t, n, 8] in layout TND", partial(_statistics_shape, name))
            for name in names
        ),
        dtype_of("dy", "query"),
        shape_of("attention_in", "dy"),
        dtype_of("attention_in", "query"),
    )


V1_NOTES = (
    "pse: the formula adds it before the scale, an example in the same text after it; the formula counts, "
    "as for pse_type 1 of npu_fusion_attention_v2. A query whose mask row is all ones gives zeros, as the "
    "device does with inner_precise=2. actual_seq_qlen: two maximal lengths are named, the larger is allowed."
)
_SOURCE = "wheel, npu_fusion_attention; op-plugin, FlashAttentionKernelNpuOpApi.cpp"
_SOURCE_V2 = "wheel, npu_fusion_attention_v2"
_SOURCE_V3 = "wheel, npu_fusion_attention_v3"

_DROPOUT = (
    dtype("dropout_mask", torch.uint8),
    Limit(
        "dropout_mask",
        "a bit for every attention weight",
        lambda a: a.dropout_mask.numel() * 8 >= _sizes(a).heads * _weights_of_a_head(a),
    ),
)
_V1 = _shared("pre_tockens", "next_tockens")
_V2 = (
    not_simulated("query_rope"),
    not_simulated("key_rope"),
    not_simulated("q_start_idx"),
    not_simulated("kv_start_idx"),
    between("pse_type", 0, 3),
    Limit("pse_type", "0 or 1", lambda a: a.pse_type in (0, 1), simulated=False),
    *_shared("pre_tokens", "next_tokens"),
    Limit(
        "sparse_mode",
        "3 only where no sequence has more queries than keys",
        lambda a: a.sparse_mode != 3 or all(queries <= keys for queries, keys in _blocks(a)),
    ),
)

FORWARD = Limits(_SOURCE, (*_V1, *_DROPOUT), V1_NOTES)
BACKWARD = Limits(_SOURCE, (*_V1, *_gradient()))
FORWARD_V2 = Limits(_SOURCE_V2, (*_V2, *_DROPOUT))
BACKWARD_V2 = Limits(_SOURCE_V2, (*_V2, *_gradient()))
FORWARD_V3 = Limits(
    _SOURCE_V3, _V1, "Hardware wants the lengths of TND on the host; the simulator takes them on the NPU."
)
BACKWARD_V3 = Limits(_SOURCE_V3, (*_V1, *_gradient()))

LIMITS = {
    "npu_fusion_attention": FORWARD,
    "npu_fusion_attention_grad": BACKWARD,
    "npu_fusion_attention_v2": FORWARD_V2,
    "npu_fusion_attention_grad_v2": BACKWARD_V2,
    "npu_fusion_attention_v3": FORWARD_V3,
    "npu_fusion_attention_grad_v3": BACKWARD_V3,
}
