"""Attention of fp32 or bf16 heads with one kernel (``attention.cpp``): scores stay in a core's cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.compiled import abi, products
from megatron_npu.ops.compiled.abi import Weighting
from megatron_npu.ops.compiled.building import library

__all__ = ["Factors", "Weighting", "backward", "forward", "takes"]


class Factors(NamedTuple):
    """What is attended with: all fp32 or all bf16, of any strides but the last one.

    Attributes:
        query: ``[heads, rows, d]``.
        key: ``[heads, keys, d]``.
        value: ``[heads, keys, dv]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor


def takes(dtype: torch.dtype) -> bool:
    """Return whether the kernel is worth while for factors of this dtype on this processor."""
    if dtype is torch.bfloat16:
        return products.has_kernel()
    return dtype is torch.float32 and products.has_avx512() and library() is not None


def forward(factors: Factors, weighting: Weighting, output: Tensor, normalizer: Tensor) -> None:
    """Write weights · values to ``output``, and for ``backward`` the logarithm of each row's normalizer.

    Args:
        factors: what is attended with.
        weighting: how.
        output: ``[heads, rows, dv]``, of the dtype of the factors.
        normalizer: ``[heads, rows, 1]``, fp32.
    """
    arithmetic = products.name_of_arithmetic(factors.query.dtype)
    abi.attention_forward(factors, weighting, output, normalizer, arithmetic)


def backward(
    factors: Factors,
    weighting: Weighting,
    result: tuple[Tensor, Tensor],
    grad: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of queries, keys and values.

    Args:
        factors: as ``forward`` was given them.
        weighting: the same.
        result: output and normalizer, as it has written them.
        grad: of the output.
        gradients: of the shapes and the dtype of the factors.
    """
    arithmetic = products.name_of_arithmetic(factors.query.dtype)
    abi.attention_backward(factors, weighting, result, grad, gradients, arithmetic)
