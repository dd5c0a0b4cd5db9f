"""Compute attention in fp32 or bf16 with one kernel that keeps the scores in the processor core's cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.compiled import abi, products
from megatron_npu.ops.compiled.abi import Weighting
from megatron_npu.ops.compiled.building import library

__all__ = ["Factors", "Weighting", "backward", "forward", "takes"]


class Factors(NamedTuple):
    """The query, key and value operands of attention, all fp32 or all bf16.

    The last dimension must be contiguous.

    Attributes:
        query: ``[heads, rows, d]``.
        key: ``[heads, keys, d]``.
        value: ``[heads, keys, dv]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor


def takes(dtype: torch.dtype) -> bool:
    """Return True if the compiled attention kernel should be used for this dtype on this processor."""
    if dtype is torch.bfloat16:
        return products.has_kernel()
    return dtype is torch.float32 and products.has_avx512() and library() is not None


def forward(factors: Factors, weighting: Weighting, output: Tensor, normalizer: Tensor) -> None:
    """Write the attention output to ``output``, and the logarithm of the sum of each row's exponentials to
    ``normalizer``.

    Args:
        factors: query, key and value.
        weighting: scale, window and dropout.
        output: ``[heads, rows, dv]``, in the dtype of the factors.
        normalizer: ``[heads, rows, 1]``, fp32; ``backward`` needs it.
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
    """Write the gradients of queries, keys and values to ``gradients``.

    Args:
        factors: see ``forward``.
        weighting: see ``forward``.
        result: the output and normalizer that ``forward`` wrote.
        grad: the gradient of the output.
        gradients: the tensors to write to, with the shapes and dtype of the factors.
    """
    arithmetic = products.name_of_arithmetic(factors.query.dtype)
    abi.attention_backward(factors, weighting, result, grad, gradients, arithmetic)
