"""Compute the matmuls of an attention tile, and choose the dtypes of their operands and of the
accumulated sums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.compiled import accumulate, products

_LONGEST_STRIDED = 512  # tokens


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, weights and accumulated sums: fp64 for calls in fp64, and fp32 for all
    others.
    """
    return torch.promote_types(dtype, torch.float32)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matmul operands, which is bf16 for bf16 tensors on processors with fast bf16
    matmuls.
    """
    return dtype if dtype is torch.bfloat16 and multiplies_bf16() else sum_dtype(dtype)


@functools.cache
def multiplies_bf16() -> bool:
    """Return True if oneDNN has fast bf16 matmuls on this processor, which requires AVX512 or AMX."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiplies_strided(grouped: Tensor, by_one_kernel: bool) -> bool:
    """Return True if our kernels can multiply heads of ``[b, g, s, r, d]`` without copying them.

    For longer sequences, which have more tiles, multiplying tile by tile from a copy is faster (Xeon without
    AMX: without the copy 512 tokens take 8 % less time, 2,048 tokens 12 % more).
    """
    if grouped.size(3) != 1 or grouped.stride(-1) != 1 or grouped.dtype is not factor_dtype(grouped.dtype):
        return False
    return by_one_kernel or (is_ours(grouped.dtype) and grouped.size(2) <= _LONGEST_STRIDED)


def is_ours(dtype: torch.dtype) -> bool:
    """Return True if our own kernel multiplies operands of this dtype, with accumulation in fp32."""
    return dtype is torch.bfloat16 and products.has_kernel()


class TileProducts:
    """The batched matmuls of an attention call.

    All operands have the same dtype.

    Args:
        dtype: the dtype of the operands, which ``factor_dtype`` returns.
        buffers: the scratch memory of the call.

    Attributes:
        dtype: the dtype of the operands.
        sums: the dtype of scores, weights and sums over tiles.
        of_scores: the dtype of operands whose products must not be rounded: that of ``sums``, or bf16 where
            our kernel multiplies it, which is exact.
    """

    def __init__(self, dtype: torch.dtype, buffers: Buffers) -> None:
        self.sums = sum_dtype(dtype)
        self.of_scores = dtype if is_ours(dtype) else self.sums
        self.dtype, self._buffers = dtype, buffers

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` converted to the dtype of the matmul operands.

        A conversion uses the buffer ``name``.
        """
        if tensor.dtype is self.dtype:
            return tensor
        return self._buffers.take(name, tuple(tensor.shape), self.dtype).copy_(tensor)

    def precise(self, out: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        """Compute ``factor · left · rightᵀ``, ``[heads, n, m]``, from operands that are not rounded to bf16.

        Args:
            out: the output tensor.
            left: ``[heads, n, d]`` in dtype ``of_scores``.
            right: ``[heads, m, d]`` in dtype ``of_scores``.
            factor: multiplies the product.
        """
        if products.takes(left, right.mT):
            products.multiply(left, right.mT, out, factor=factor)
        else:
            left, right = left.to(self.sums), right.to(self.sums)
            torch.baddbmm(out, left, right.mT, beta=0, alpha=factor, out=out)

    def write(self, out: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        """Write ``factor · left · right`` to ``out``. All tensors have the operands' dtype."""
        if products.takes(left, right) and products.takes_result(out):
            products.multiply(left, right, out, factor=factor)
            return
        torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)

    def add(self, total: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
        """Add ``factor · left · right`` to the tensor ``total``, which has a dtype for accumulated sums."""
        if products.takes(left, right) and products.takes_result(total):
            products.multiply(left, right, total, factor=factor, add=True)
            return
        if self.dtype is self.sums:
            total.baddbmm_(left, right, alpha=factor)
            return
        product = self._buffers.take("product", tuple(total.shape), self.dtype)
        accumulate(total, torch.bmm(left, right, out=product), factor)


@contextlib.contextmanager
def bf16_products(dtype: torch.dtype) -> Iterator[None]:
    """Allow oneDNN to round fp32 matmul operands to bf16 inside the ``with`` block if ``dtype`` is bf16.

    Queries, keys and values lose nothing; weights are rounded as in any bf16 kernel; sums and softmax stay
    fp32. On processors with AMX, the matmuls take half the time; on other processors, nothing changes. The
    switch is global to the process, so it is reset immediately afterwards. If this torch has no such switch,
    matmuls stay fp32.
    """
    switch = getattr(torch.backends.mkldnn, "matmul", None)
    if dtype is not torch.bfloat16 or switch is None:
        yield
        return
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
