"""Define the limits on the arguments of matmuls that communicate; quantized matmuls are not simulated."""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    dimensions,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
)
from megatron_npu.sim.kernels.limits.common import HALVES

_WORLDS = (2, 4, 8)
_LEAST, _MOST = 256, 65535  # of k, the latter excluded

_QUANTISED = tuple(not_simulated(name) for name in ("x1_scale", "x2_scale", "output_dtype"))
_COMMON = (
    dtype("input", *HALVES),
    dimensions("input", 2),
    Limit("input", f"k from {_LEAST} to below {_MOST}", lambda a: _LEAST <= a.input.size(1) < _MOST),
    Limit("input", "not transposed", lambda a: a.input.is_contiguous()),
    dtype_of("x2", "input"),
    dimensions("x2", 2),
    Limit("x2", "[k, n] for input [m, k]", lambda a: a.x2.size(0) == a.input.size(1)),
    one_of("world_size", *_WORLDS),
    Limit("bias", "None or zeros", lambda a: not a.bias.any()),
    one_of("comm_turn", 0),
    one_of("comm_mode", None, "ai_cpu", "aiv"),
    *_QUANTISED,
)
_NOTES = (
    "On Atlas A2, all communicating matmuls of one model must name the same communicator, whose NPUs "
    "must be fully connected; neither is checked. Atlas A3 also supports 16 ranks."
)

ALL_GATHER = Limits("wheel, npu_all_gather_base_mm", (*_COMMON, one_of("gather_index", 0)), _NOTES)
REDUCE_SCATTER = Limits(
    "wheel, npu_mm_reduce_scatter_base",
    (
        *_COMMON,
        one_of("reduce_op", "sum"),
        Limit("input", "m divisible by world_size", lambda a: a.input.size(0) % a.world_size == 0),
    ),
    _NOTES,
)
ALL_REDUCE = Limits(
    "wheel, npu_mm_all_reduce_base",
    (
        dtype("x1", *HALVES),
        dimensions("x1", 2, 3),
        Limit("x1", "at least one element", lambda a: a.x1.numel() > 0),
        Limit("x1", "not transposed", lambda a: a.x1.is_contiguous()),
        dtype_of("x2", "x1"),
        dimensions("x2", 2),
        Limit("x2", "[k, n] for x1 [..., k]", lambda a: a.x2.size(0) == a.x1.size(-1)),
        one_of("reduce_op", "sum"),
        one_of("comm_turn", 0),
        *(
            not_simulated(name)
            for name in (
                "bias antiquant_scale antiquant_offset x3 dequant_scale pertoken_scale comm_quant_scale_1 "
                "comm_quant_scale_2 group_sizes y_dtype x1_dtype x2_dtype dequant_scale_dtype "
                "pertoken_scale_dtype"
            ).split()
        ),
    ),
    "The wheel documents it for inference and does not forbid k below 256. 1, 2, 4 or 8 ranks; not checked.",
)

LIMITS = {
    "npu_all_gather_base_mm": ALL_GATHER,
    "npu_mm_reduce_scatter_base": REDUCE_SCATTER,
    "npu_mm_all_reduce_base": ALL_REDUCE,
}
