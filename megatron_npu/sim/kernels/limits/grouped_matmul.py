"""Define the limits on the arguments of grouped matmuls."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    absent,
    dimensions,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
    required,
)
from megatron_npu.sim.kernels.limits.common import FLOATS, HALVES, not_decreasing

GROUPS = 1024  # of a group_list tensor
TENSORS = 128  # of a list of tensors
INNER_AXIS = 65536  # the last dimension of x and weight must be smaller

# Which dtype a bias has, by that of x (wheel, npu_grouped_matmul, table 1, without quantisation).
GROUPED_BIAS = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
}

GROUPED_UNUSED = (
    "offset",
    "activation_input",
    "activation_quant_scale",
    "activation_quant_offset",
)

GROUPED_QUANTISED = ("scale", "antiquant_scale", "antiquant_offset", "per_token_scale")

GROUPED_TENSORS = (
    Limit("x", f"1 to {TENSORS} tensors", lambda a: 1 <= len(a.x) <= TENSORS),
    Limit("weight", f"1 to {TENSORS} tensors", lambda a: 1 <= len(a.weight) <= TENSORS),
    dtype("x", *FLOATS),
    Limit("x", "one dtype", lambda a: len({t.dtype for t in a.x}) == 1),
    dtype_of("weight", "x"),
    dimensions("x", 2, 6),
    dimensions("weight", 2, 3),
    Limit("x", f"last dimensions below {INNER_AXIS}", lambda a: max(t.size(-1) for t in a.x) < INNER_AXIS),
    Limit(
        "weight",
        f"last dimensions below {INNER_AXIS}",
        lambda a: max(t.size(-1) for t in a.weight) < INNER_AXIS,
    ),
    *(absent(name) for name in GROUPED_UNUSED),
    *(not_simulated(name) for name in GROUPED_QUANTISED),
    one_of("split_item", 0, 1, 2, 3),
    one_of("act_type", 0),
    Limit(
        "bias",
        "float16 with float16, float32 with bfloat16 and float32",
        lambda a: all(t.dtype == GROUPED_BIAS[a.x[0].dtype] for t in a.bias),
    ),
    Limit("bias", "the same number of tensors as weight", lambda a: len(a.bias) == len(a.weight)),
)


def _ends(a: SimpleNamespace) -> list[int]:
    sizes = a.group_list.cumsum(0) if a.group_list_type == 1 else a.group_list
    return [int(end) for end in sizes]


def _group_count(a: SimpleNamespace) -> bool:
    if a.group_type == -1:
        return len(a.x) == len(a.weight)
    if a.group_type == 2 or a.weight[0].dim() == 3:
        return len(a.weight) == 1 and len(a.x) == 1
    return len(a.x) in (1, len(a.weight))


def _inner_sizes(a: SimpleNamespace) -> bool:
    if a.group_type == 2:
        return a.x[0].size(1) == a.weight[0].size(0)
    sizes = [w.size(-2) for w in a.weight]
    return all(t.size(-1) in sizes for t in a.x) and len(a.x) in (1, len(sizes))


GROUPED_MATMUL = Limits(
    "wheel, npu_grouped_matmul, group_list a tensor; op-plugin, GroupedMatmulKernelNpuOpApi.cpp",
    (
        *GROUPED_TENSORS,
        required("group_type"),
        one_of("group_type", -1, 0, 2),
        one_of("group_list_type", 0, 1),
        *(not_simulated(name) for name in ("output_dtype", "tuning_config")),
        *(not_simulated(f"{name}_dtype") for name in ("x", "weight", "scale", "per_token_scale")),
        Limit(
            "weight",
            "the same number as x with group_type -1; one [e, k, n], or [k, n] each, with 0; one with 2",
            _group_count,
        ),
        Limit(
            "split_item",
            "0 or 1 with group_type -1, else 2 or 3",
            lambda a: (a.split_item in (0, 1)) == (a.group_type == -1),
        ),
        Limit("weight", "the inner dimension of x", _inner_sizes),
        Limit(
            "group_list",
            "None with group_type -1, a tensor for one x with 0 and 2",
            lambda a: (a.group_list is None) == (a.group_type == -1) or len(a.x) > 1,
            even_none=True,
        ),
        dtype("group_list", torch.int64),
        dimensions("group_list", 1),
        Limit(
            "group_list",
            f"one entry per weight, up to {GROUPS} (up to {TENSORS} for a list of weights)",
            lambda a: (
                1 <= len(a.group_list) <= GROUPS
                and (
                    a.group_type == 2
                    or len(a.group_list) == (a.weight[0].size(0) if a.weight[0].dim() == 3 else len(a.weight))
                )
            ),
        ),
        Limit(
            "group_list",
            "no negative sizes, non-decreasing cumulative ends",
            lambda a: not_decreasing(_ends(a)),
        ),
        Limit(
            "group_list",
            "a sum that covers the divided axis: rows of x with group_type 0, k with 2",
            lambda a: _ends(a)[-1] == (a.x[0].size(1) if a.group_type == 2 else sum(t.size(0) for t in a.x)),
        ),
        Limit(
            "x",
            "a transposed view of [k, m] with group_type 2, else contiguous rows",
            lambda a: (
                all(t.stride(-1) == 1 or t.size(-1) == 1 for t in a.x)
                if a.group_type != 2
                else a.x[0].stride(0) == 1 or a.x[0].size(0) == 1
            ),
        ),
        Limit("bias", "None with group_type 2", lambda a: a.group_type != 2),
    ),
    "The wheel allows group_type -1 and 0 on Atlas A2; op-plugin's source and aclnnGroupedMatmul also take "
    "2, which training needs for the gradient of the weights.",
)

GROUPED_MATMUL_LIST = Limits(
    "wheel, npu_grouped_matmul, group_list a list of int",
    (
        *GROUPED_TENSORS,
        absent("group_type"),
        not_simulated("output_dtype"),
        dimensions("weight", 2),
        Limit(
            "group_list",
            "at least two non-negative, increasing ends",
            lambda a: len(a.group_list) != 1 and not_decreasing(list(a.group_list)),
        ),
        Limit(
            "group_list",
            "a value if one x is used with several weights",
            lambda a: a.group_list is not None or len(a.x) == len(a.weight),
            even_none=True,
        ),
        Limit("group_list", "one entry per weight", lambda a: len(a.group_list) == len(a.weight)),
        Limit("x", "one tensor, or the same number as weight", lambda a: len(a.x) in (1, len(a.weight))),
        Limit(
            "x",
            "2 dimensions with a group_list or with split_item 2 or 3",
            lambda a: all(t.dim() == 2 for t in a.x) or (a.group_list is None and a.split_item in (0, 1)),
        ),
        Limit(
            "group_list",
            "the rows of x",
            lambda a: a.group_list[-1] == sum(t.size(0) for t in a.x),
        ),
        Limit(
            "weight",
            "the inner dimension of x",
            lambda a: all(t.size(-1) in [w.size(0) for w in a.weight] for t in a.x),
        ),
    ),
)

GROUPED_MATMUL_ADD = Limits(
    "wheel, npu_grouped_matmul_add",
    (
        dtype("x", *HALVES),
        dimensions("x", 2),
        dtype_of("weight", "x"),
        dimensions("weight", 2),
        Limit("weight", "the rows of x", lambda a: a.weight.size(0) == a.x.size(0)),
        Limit("x", f"a last dimension below {INNER_AXIS}", lambda a: a.x.size(1) < INNER_AXIS),
        Limit("weight", f"a last dimension below {INNER_AXIS}", lambda a: a.weight.size(1) < INNER_AXIS),
        one_of("transpose_x", True),
        one_of("transpose_weight", False),
        one_of("group_type", 2),
        one_of("group_list_type", 0, 1),
        dtype("group_list", torch.int64),
        dimensions("group_list", 1),
        Limit("group_list", f"up to {GROUPS} groups", lambda a: 1 <= len(a.group_list) <= GROUPS),
        Limit(
            "group_list",
            "no negative sizes, non-decreasing cumulative ends",
            lambda a: not_decreasing(_ends(a)),
        ),
        Limit("group_list", "at most the rows of x", lambda a: _ends(a)[-1] <= a.x.size(0)),
        dtype("input", torch.float32),
        Limit(
            "input",
            "[groups, m, n] for x [k, m] and weight [k, n]",
            lambda a: tuple(a.input.shape) == (len(a.group_list), a.x.size(1), a.weight.size(1)),
        ),
    ),
    "op-plugin's operation without underscore also changes its input; the simulator's does not.",
)

LIMITS = {
    "npu_grouped_matmul": GROUPED_MATMUL,
    "npu_grouped_matmul.List": GROUPED_MATMUL_LIST,
    "npu_grouped_matmul_add": GROUPED_MATMUL_ADD,
    "npu_grouped_matmul_add_": GROUPED_MATMUL_ADD,
}
