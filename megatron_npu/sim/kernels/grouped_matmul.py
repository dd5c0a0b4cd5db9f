"""Define reference kernels for matmuls of groups of rows with different weights, as in mixtures of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

K_SPLIT = 2  # group_type: the groups divide the summed axis, as the gradient of the weights needs


@kernel("npu_grouped_matmul")
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Return the products ``x_i · weight_i + bias_i``, as one tensor per group or as a single tensor.

    By ``group_type``:
        -1: ``x`` and ``weight`` are lists of equal length.
        0: ``group_list`` divides the rows of ``x`` ``[m, k]`` among ``[e, k, n]`` or a list of ``[k, n]``.
        2: it divides k of ``x`` ``[m, k]`` and ``weight`` ``[k, n]``; the result is ``[e, m, n]``.
    """
    ends = None if group_list is None else group_ends(group_list, group_list_type or 0)
    if group_type == K_SPLIT:
        assert ends is not None  # by the limits
        rows = _groups(ends)
        return [torch.stack([_product(x[0][:, row], weight[0][row]) for row in rows])]
    return _by_rows(x, weight, bias, ends, joined=split_item in (2, 3))


@kernel("npu_grouped_matmul.List")
def npu_grouped_matmul_list(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the products as ``npu_grouped_matmul`` does, for cumulative lengths that are given as a list
    on the host.
    """
    return _by_rows(x, weight, bias, group_list, joined=split_item in (2, 3))


def group_ends(group_list: Tensor, group_list_type: int) -> list[int]:
    """Return, for each group of rows, the index of the row after its last one.

    The given sizes are cumulative (type 0) or plain (type 1).
    """
    return [int(end) for end in (group_list.cumsum(0) if group_list_type == 1 else group_list)]


def _by_rows(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    ends: Sequence[int] | None,
    joined: bool,
) -> list[Tensor]:
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    parts = list(x)
    if len(x) == 1 and ends is not None:
        parts = [x[0][rows] for rows in _groups(ends)]
    biases: Sequence[Tensor | None] = [None] * len(weights)
    if bias is not None:
        biases = list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else bias
    products = [_product(*each) for each in zip(parts, weights, biases, strict=True)]
    return [torch.cat(products)] if joined else products


def _groups(ends: Sequence[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x · weight + bias``, accumulated in fp32 and returned in the dtype of ``x``."""
    product = x.float() @ weight.float()
    return (product if bias is None else product + bias.float()).to(x.dtype)


@kernel("npu_grouped_matmul_add_")
def npu_grouped_matmul_add_in_place(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = K_SPLIT,
    group_list_type: int | None = 0,
) -> Tensor:
    """Add ``x_iᵀ · weight_i`` to the fp32 tensor ``input`` ``[e, m, n]``.

    The groups divide k of ``x`` ``[k, m]``.
    """
    for total, rows in zip(input, _groups(group_ends(group_list, group_list_type or 0)), strict=True):
        total.add_(x[rows].float().t() @ weight[rows].float())
    return input


@kernel("npu_grouped_matmul_add")
def npu_grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = K_SPLIT,
    group_list_type: int | None = 0,
) -> Tensor:
    """Return the sum that ``npu_grouped_matmul_add_`` computes, without changing ``input``."""
    return npu_grouped_matmul_add_in_place(
        input.clone(), x, weight, group_list, group_list_type=group_list_type
    )
