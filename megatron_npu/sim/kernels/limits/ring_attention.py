"""Define the limits on the arguments of the merge step of ring attention."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, one_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS, not_decreasing

STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


def _statistics_shape(a: SimpleNamespace) -> bool:
    statistics, attention = a.prev_softmax_max.shape, a.prev_attn_out.shape
    if a.input_layout == "SBH":
        fits = statistics[0] == attention[1] and statistics[2] == attention[0]
        return fits and attention[2] % statistics[1] == 0
    return tuple(statistics[:2]) == tuple(attention[:2])


def _ring_lengths(a: SimpleNamespace) -> bool:
    if a.input_layout == "SBH":
        return True
    ends = a.actual_seq_qlen.tolist()
    starts = ends[0] == 0 or a.input_softmax_layout == "TND"
    return starts and ends[-1] == a.prev_attn_out.size(0) and not_decreasing(ends)


RING_ATTENTION_UPDATE = Limits(
    "wheel, npu_ring_attention_update; op-plugin, RingAttentionUpdateKernelNpuOpApi.cpp; aclnn",
    (
        one_of("input_layout", "SBH", "TND"),
        one_of("input_softmax_layout", "", "SBH", "TND"),
        dtype("prev_attn_out", *FLOATS),
        dimensions("prev_attn_out", 3),
        shape_of("cur_attn_out", "prev_attn_out"),
        dtype_of("cur_attn_out", "prev_attn_out"),
        *(dtype(name, torch.float32) for name in STATISTICS),
        *(shape_of(name, "prev_softmax_max") for name in STATISTICS[1:]),
        Limit(
            "prev_softmax_max",
            "4 dimensions in layout SBH, 3 in TND",
            lambda a: a.prev_softmax_max.dim() == (4 if a.input_layout == "SBH" else 3),
        ),
        Limit("prev_softmax_max", "a last dimension of 8", lambda a: a.prev_softmax_max.size(-1) == 8),
        Limit("prev_softmax_max", "[b, n, s, 8] for [s, b, h], [t, n, 8] for [t, n, d]", _statistics_shape),
        Limit(
            "prev_attn_out",
            "a last dimension divisible by 64 in layout TND",
            lambda a: a.input_layout == "SBH" or a.prev_attn_out.size(-1) % 64 == 0,
        ),
        Limit(
            "actual_seq_qlen",
            "a value in layout TND",
            lambda a: a.input_layout == "SBH" or a.actual_seq_qlen is not None,
            even_none=True,
        ),
        dtype("actual_seq_qlen", torch.int64),
        Limit(
            "actual_seq_qlen",
            "cumulative lengths from 0 to t; the 0 may be omitted if input_softmax_layout is TND",
            _ring_lengths,
        ),
    ),
)

LIMITS = {
    "npu_ring_attention_update": RING_ATTENTION_UPDATE,
}
