"""Attention of a tile of bf16 heads (``attention.cpp``): scores never leave a core's cache."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.compiled import Kept
from megatron_npu.ops.compiled.building import library
from megatron_npu.ops.compiled.products import pairs

_NO_LIMIT = 1 << 40  # keys: further away than any


class Seen(NamedTuple):
    """Which keys of a tile its queries see: ``[begin + i, end + i)`` of query i, where these exist.

    Attributes:
        begin: of the first query; None: every query sees all keys on the left.
        end: the same of the keys on the right.
        repeats: rows that one query has, one for each of its heads.
    """

    begin: int | None
    end: int | None
    repeats: int


class Factors(NamedTuple):
    """What is attended with: all bf16, of any strides but the last one.

    Attributes:
        query: ``[heads, rows, d]``.
        key: ``[heads, keys, d]``.
        value: ``[heads, keys, dv]``.
        scale: of the scores.
        gain: of the weights that dropout keeps.
        kept: which ones these are, ``[heads, rows, keys]``; None: all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    gain: float
    kept: Kept | None


class _Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("next", ctypes.c_int64), ("row", ctypes.c_int64))


class _Tile(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "keys", "size", "value_size", "repeats")),
        *((name, ctypes.c_int64) for name in ("begin", "end")),
        *((name, ctypes.c_float) for name in ("scale", "gain")),
        *(("bits", ctypes.c_void_p), ("most", ctypes.c_int64)),
    )


def forward(factors: Factors, seen: Seen, output: Tensor) -> None:
    """Write ``gain · softmax(scale · query · keyᵀ) · value`` to ``output``, ``[heads, rows, dv]``, bf16."""
    _call("attention_forward", _tile(factors, seen), output)


def backward(
    factors: Factors, seen: Seen, grad: Tensor, d_query: Tensor, d_key: Tensor, d_value: Tensor
) -> None:
    """Write the gradient of the queries, and add those of keys and values.

    Args:
        factors: as ``forward`` was given them.
        seen: the same.
        grad: of the output, ``[heads, rows, dv]``, bf16.
        d_query: ``[heads, rows, d]``, bf16.
        d_key: ``[heads, keys, d]``, fp32.
        d_value: ``[heads, keys, dv]``, fp32.
    """
    _call("attention_backward", _tile(factors, seen), grad, d_query, d_key, d_value)


def _tile(factors: Factors, seen: Seen) -> _Tile:
    query, key, value, scale, gain, kept = factors
    sizes = (*query.shape[:2], key.size(1), key.size(2), value.size(2), seen.repeats)
    begin = -_NO_LIMIT if seen.begin is None else seen.begin
    end = _NO_LIMIT if seen.end is None else seen.end
    dropped = (None, 0) if kept is None else (kept.bits.data_ptr(), kept.most)
    return _Tile(*map(_rows, (query, key, value)), *sizes, begin, end, scale, gain, *dropped)


def _rows(tensor: Tensor) -> _Rows:
    return _Rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _call(name: str, tile: _Tile, *tensors: Tensor) -> None:
    others = [ctypes.byref(_rows(tensor)) for tensor in tensors]
    getattr(library(), name)(ctypes.byref(tile), *others, pairs(), torch.get_num_threads())
