"""Define the limits on the arguments of npu_fusion_attention and its gradient in all three versions."""

from __future__ import annotations

from functools import partial

import torch

from megatron_npu.sim.kernels.attention import layouts
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
from megatron_npu.sim.kernels.limits.attention_conditions import (
    SEQUENCES,
    bias_is_compressed,
    bias_shape,
    blocks_of,
    compressed_content,
    has_not_too_many_sequences,
    has_sequences,
    has_the_layouts_dimensions,
    head_count,
    head_sizes,
    holds_band,
    is_cumulative,
    layout_of,
    mask_covers_band,
    mask_covers_prefix,
    mask_shape,
    no_blind_row,
    of_sizes,
    prefix_values,
    same_batch_and_sequence,
    same_count,
    sizes_of,
    statistics_shape,
    weights_of_a_head,
)
from megatron_npu.sim.kernels.limits.common import FLOATS

HEADS = 256
HEAD_SIZE = 768
SEQUENCE = 1 << 20  # "1M", also of the total of TND
BATCH = 2 << 20  # "2M"
PREFIX_BATCH = 32
MASKLESS_MODE = 0
PREFIX_MODES = (5, 6)
DENSE_MODES = range(7)
VARIABLE_MODES = (0, 1, 2, 3, 4, 6, 7, 8)
SIMULATED_MODES = range(7)


def _shared(before: str, after: str) -> tuple[Limit, ...]:
    """Return the limits that the forward and backward operations share.

    ``before`` and ``after`` are the names of band arguments.
    """
    tensors = ("query", "key", "value")
    return (
        Limit(
            "input_layout",
            "BSH, SBH, BSND, BNSD or TND (in any case)",
            lambda a: layout_of(a) in layouts.DIMENSIONS,
        ),
        between("head_num", 1, HEADS),
        *(
            Limit(
                name,
                "3 dimensions in layouts BSH, SBH and TND, 4 in BSND and BNSD",
                partial(has_the_layouts_dimensions, name),
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
            head_count,
        ),
        Limit("key", "the batch of query, and value the same sequence and heads", same_batch_and_sequence),
        Limit("key", "the head size of query", head_sizes),
        Limit("query", f"head sizes from 1 to {HEAD_SIZE}", of_sizes(lambda s: 1 <= s.size <= HEAD_SIZE)),
        Limit("value", "a head size from 1 to that of key", of_sizes(lambda s: 1 <= s.value_size <= s.size)),
        Limit(
            "key",
            "a number of heads that divides that of query",
            of_sizes(lambda s: s.kv_heads > 0 and s.heads % s.kv_heads == 0),
        ),
        Limit(
            "query",
            f"sequences of 1 to {SEQUENCE} tokens",
            of_sizes(lambda s: 1 <= s.queries <= SEQUENCE and 1 <= s.keys <= SEQUENCE),
        ),
        Limit(
            "query",
            f"a batch of 1 to {BATCH}",
            lambda a: layout_of(a) == "TND" or 1 <= sizes_of(a).batch <= BATCH,
        ),
        Limit("keep_prob", "above 0 and up to 1", lambda a: 0 < a.keep_prob <= 1),
        one_of("inner_precise", 0, 1, 2),
        one_of("softmax_layout", "", "TND"),
        Limit(
            "softmax_layout",
            "TND only with input_layout TND",
            lambda a: not a.softmax_layout or layout_of(a) == "TND",
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
                partial(has_sequences, name),
                even_none=True,
            )
            for name in names
        ),
        *(
            Limit(
                name,
                f"1 to {SEQUENCES} entries",
                partial(has_not_too_many_sequences, name),
            )
            for name in names
        ),
        Limit("actual_seq_kvlen", "the same number of entries as actual_seq_qlen", partial(same_count, list)),
        *(
            Limit(
                name,
                f"non-decreasing ends that reach all tokens of {tokens}; trailing zeros leave sequences out",
                is_cumulative(name, tokens),
            )
            for name, tokens in zip(names, ("query", "key"), strict=True)
        ),
        Limit(
            "actual_seq_kvlen",
            "the same sequences left out as in actual_seq_qlen",
            partial(same_count, layouts.used),
        ),
    )


def _modes() -> tuple[Limit, ...]:
    return (
        Limit(
            "sparse_mode",
            "0 to 6, in layout TND 0 to 4 and 6 to 8",
            lambda a: a.sparse_mode in (VARIABLE_MODES if layout_of(a) == "TND" else DENSE_MODES),
        ),
        Limit("sparse_mode", "0 to 6", lambda a: a.sparse_mode in SIMULATED_MODES, simulated=False),
        Limit(
            "atten_mask",
            "the mask that a sparse_mode above 0 requires; without it the device attends to everything",
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
            mask_shape,
        ),
        Limit(
            "atten_mask",
            "ones above the diagonal in sparse_mode 2, 3 and 4, with half a rectangle of ones below in 6",
            compressed_content,
        ),
        Limit("atten_mask", "no row of ones only in layout TND", no_blind_row),
        *(
            Limit(
                name,
                f"negative in sparse_mode 0 and 4 only with {other} of its size or more, and above -{length}",
                holds_band(name, other, side),
            )
            for name, other, side, length in ((before, after, 0, "sq"), (after, before, 1, "skv"))
        ),
        Limit(
            "atten_mask",
            f"ones outside the band of {before} and {after} in sparse_mode 0",
            mask_covers_band(before, after),
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
                or (len(a.prefix) == sizes_of(a).batch and len(a.prefix) <= PREFIX_BATCH)
            ),
        ),
        Limit(
            "prefix",
            "0 to skv, or skv - sq to skv where sq is at most skv",
            lambda a: a.sparse_mode not in PREFIX_MODES or prefix_values(a),
        ),
        Limit("atten_mask", "the prefix and the causal triangle in sparse_mode 5", mask_covers_prefix),
    )


def _bias() -> tuple[Limit, ...]:
    return (
        dtype_of("pse", "query"),
        Limit("pse", "None in layout TND", lambda a: layout_of(a) != "TND", simulated=False),
        Limit("pse", "biases of all rows", lambda a: not bias_is_compressed(a), simulated=False),
        Limit("pse", "[b, n, sq, skv], [b, n, 1, skv] or [1, n, sq, skv]", bias_shape),
    )


def _gradient() -> tuple[Limit, ...]:
    names = ("softmax_max", "softmax_sum")
    return (
        *(required(name) for name in (*names, "attention_in")),
        *(dtype(name, torch.float32) for name in names),
        *(
            Limit(name, "[b, n, sq, 8], [t, n, 8] in layout TND", partial(statistics_shape, name))
            for name in names
        ),
        dtype_of("dy", "query"),
        shape_of("attention_in", "dy"),
        dtype_of("attention_in", "query"),
    )


V1_NOTES = (
    "pse: the documented formula adds it before the scale, an example in the same text after it; the "
    "simulator follows the formula, as for pse_type 1 of npu_fusion_attention_v2. A query whose mask "
    "row is all ones gives zeros, as the device does with inner_precise=2. actual_seq_qlen: the "
    "documentation names two maximum lengths; the larger one is allowed."
)
_SOURCE = "wheel, npu_fusion_attention; op-plugin, FlashAttentionKernelNpuOpApi.cpp"
_SOURCE_V2 = "wheel, npu_fusion_attention_v2"
_SOURCE_V3 = "wheel, npu_fusion_attention_v3"

_DROPOUT = (
    dtype("dropout_mask", torch.uint8),
    Limit(
        "dropout_mask",
        "one bit per attention weight",
        lambda a: a.dropout_mask.numel() * 8 >= sizes_of(a).heads * weights_of_a_head(a),
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
        lambda a: a.sparse_mode != 3 or all(queries <= keys for queries, keys in blocks_of(a)),
    ),
)

FORWARD = Limits(_SOURCE, (*_V1, *_DROPOUT), V1_NOTES)
BACKWARD = Limits(_SOURCE, (*_V1, *_gradient()))
FORWARD_V2 = Limits(_SOURCE_V2, (*_V2, *_DROPOUT))
BACKWARD_V2 = Limits(_SOURCE_V2, (*_V2, *_gradient()))
FORWARD_V3 = Limits(
    _SOURCE_V3,
    _V1,
    "Hardware expects the lengths for TND on the host; the simulator expects them on the NPU.",
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
