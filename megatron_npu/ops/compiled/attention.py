"""Attention of fp32 or bf16 heads by one kernel (``attention.cpp``): scores never leave a core's cache."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.compiled import products
from megatron_npu.ops.compiled.building import library

_NO_LIMIT = 1 << 40  # keys: further away than any


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


class Weighting(NamedTuple):
    """How values are weighted: ``gain · kept(softmax(scale · query · keyᵀ))``.

    Query i sees keys ``[begin + i, end + i)``, where these exist; each sees one.

    Attributes:
        begin: of the first query; None: every query sees all keys on the left.
        end: the same of the keys on the right.
        repeats: rows that one query has, one for each of its heads.
        scale: of the scores.
        seed: of what dropout keeps, 64 bits.
        keep: of 65,536 weights; all of them: no dropout.
        gain: of those that are kept.
    """

    begin: int | None
    end: int | None
    repeats: int
    scale: float
    seed: int
    keep: int
    gain: float


class _Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("next", ctypes.c_int64), ("row", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "keys", "size", "value_size", "repeats")),
        *((name, ctypes.c_int64) for name in ("begin", "end")),
        *((name, ctypes.c_float) for name in ("scale", "gain")),
        *(("seed", ctypes.c_uint64), ("keep", ctypes.c_int64)),
    )


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
    _run("forward", factors, weighting, output, normalizer)


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
    _run("backward", factors, weighting, *result, grad, *gradients)


def _run(direction: str, factors: Factors, weighting: Weighting, *tensors: Tensor) -> None:
    query, key, value = factors
    sizes = (*query.shape[:2], key.size(1), key.size(2), value.size(2), weighting.repeats)
    begin = -_NO_LIMIT if weighting.begin is None else weighting.begin
    end = _NO_LIMIT if weighting.end is None else weighting.end
    dropout = (weighting.scale, weighting.gain, weighting.seed, weighting.keep)
    call = _Call(*map(_rows, factors), *sizes, begin, end, *dropout)
    kernel = getattr(library(), f"attention_{direction}_{products.name_of_arithmetic(query.dtype)}")
    kernel(ctypes.byref(call), *(ctypes.byref(_rows(each)) for each in tensors), torch.get_num_threads())


def _rows(tensor: Tensor) -> _Rows:
    return _Rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
