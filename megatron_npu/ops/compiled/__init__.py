"""Provide compiled CPU kernels that pass over memory once where torch's kernels pass over it several times.

``kernels.cpp`` contains them; ``products`` covers matmuls and ``attention`` whole attention calls.
``building`` compiles the kernels if g++ is installed, and ``abi`` calls the kernels and checks their
arguments. The functions here may be called if ``usable`` returns True; otherwise, and with
``MEGATRON_NPU_COMPILED=0``, operations use torch's own functions. Results differ only by rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.compiled import abi
from megatron_npu.ops.compiled.abi import is_plain
from megatron_npu.ops.compiled.building import library

__all__ = ["Kept", "accumulate", "available", "exponentials_", "gelu", "is_plain", "library"]
__all__ += ["norm_backward", "product_and_sum", "softmax", "softmax_backward", "usable"]

_DTYPES = (torch.float32, torch.bfloat16)


def available() -> bool:
    """Return True if the compiled kernels are loaded and torch.compile is not tracing."""
    return not torch.compiler.is_compiling() and library() is not None


def usable(*tensors: Tensor) -> bool:
    """Return True if the kernels support the given tensors: all fp32 or all bf16, contiguous, on a CPU."""
    dtype = tensors[0].dtype
    if dtype not in _DTYPES or torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if not is_plain(tensor) or tensor.dtype is not dtype or not tensor.is_contiguous():
            return False
    return library() is not None


def exponentials_(values: Tensor, reference: Tensor, sums: Tensor) -> None:
    """Replace ``values`` with ``exp(values - reference)``, and add the sums of the unrounded rows to
    ``sums``.

    Args:
        values: ``[n, m]``, for which ``usable`` is True; changed in place.
        reference: ``[n]``, fp32, contiguous.
        sums: like ``reference``.
    """
    abi.exponentials(values, reference, sums)


def gelu(input: Tensor, bias: Tensor | None, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``gelu(input + bias)`` (tanh form), and its derivative if ``with_slope`` is set.

    Args:
        input: ``[..., h]``, ``usable``, as the results are.
        bias: ``[h]``, of any float dtype, or None.
        with_slope: whether to return the derivative.
    """
    output = torch.empty_like(input)
    slope = torch.empty_like(input) if with_slope else None
    width = input.size(-1)
    if bias is None:
        added = torch.zeros(width, dtype=torch.float32, device="cpu")
    else:
        added = bias.detach().resolve_neg().to(torch.float32).contiguous()
    abi.gelu(input, added, output, slope)
    return output, slope


def product_and_sum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elementwise product ``[..., h]`` of two tensors, and the product's sum over all rows,
    fp32 ``[h]``.
    """
    output, sums = torch.empty_like(left), torch.empty(left.size(-1), dtype=torch.float32, device="cpu")
    abi.product_and_sum(left, right, output, sums)
    return output, sums


def norm_backward(
    grad: Tensor, input: Tensor, mean: Tensor | None, rstd: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of a norm's input, ``[n, h]``, and the fp32 gradients of its factor and bias,
    ``[h]``.

    Args:
        grad: gradient of the output, ``[n, h]``, for which ``usable`` is True.
        input: like ``grad``.
        mean: mean of each row, ``[n, 1]``, fp32; None for an RMS norm, which has no bias.
        rstd: like ``mean``.
        factor: ``[h]``, fp32, contiguous.
    """
    d_input, d_factor = torch.empty_like(input), torch.empty_like(factor)
    d_bias = None if mean is None else torch.empty_like(factor)
    abi.norm_backward(grad, input, mean, rstd, factor, (d_input, d_factor, d_bias))
    return d_input, d_factor, d_bias


class Kept(NamedTuple):
    """A mask of the values that dropout keeps.

    A value is kept if its 16 random bits, read as an int16, are at most ``most``.

    Attributes:
        bits: int64, one element for four values; contiguous.
        most: an int16.
    """

    bits: Tensor
    most: int


_EVERYTHING = (None, 0)  # is kept


def softmax(scores: Tensor, weights: Tensor | None, rounded: Tensor, kept: Kept | None = None) -> None:
    """Compute the softmax of attention scores over the last dimension.

    Write it to ``rounded`` and, unrounded, to ``weights``.

    Args:
        scores: ``[..., m]``, fp32, for which ``usable`` is True.
        weights: like ``scores``, or ``scores`` itself; None if they are not needed.
        rounded: a tensor of the same shape, bf16, for which ``usable`` is True.
        kept: the values that ``rounded`` keeps; the others are set to 0. None means all values.
    """
    abi.softmax(scores, weights, rounded, *_EVERYTHING if kept is None else kept)


def softmax_backward(grad: Tensor, weights: Tensor, rounded: Tensor, kept: Kept | None = None) -> None:
    """Compute the gradient of attention scores, and write it to ``rounded`` in bf16.

    Args:
        grad: gradient of ``softmax``'s ``rounded``, ``[..., m]``, fp32, for which ``usable`` is True.
        weights: as ``softmax`` wrote them.
        rounded: of the same shape, bf16, for which ``usable`` is True.
        kept: as in ``softmax``.
    """
    abi.softmax_backward(grad, weights, rounded, *_EVERYTHING if kept is None else kept)


def accumulate(total: Tensor, part: Tensor, factor: float = 1.0) -> None:
    """Add ``factor · part`` to ``total`` in one pass, even if ``total`` is fp32 and ``part`` is bf16.

    torch would first copy a part whose dtype differs. Tensors that the kernel does not support are added by
    torch.

    Args:
        total: any float tensor; changed in place.
        part: a tensor of the same shape.
    """
    if not _takes(total, part):
        total.add_(part, alpha=factor)
        return
    abi.accumulate(total, part, factor)


def _takes(total: Tensor, part: Tensor) -> bool:
    """Return True if ``accumulate`` has a kernel for a plain fp32 total and a bf16 part of the same shape."""
    if part.dtype is not torch.bfloat16 or total.dtype is not torch.float32 or not usable(part):
        return False
    return is_plain(total) and total.shape == part.shape and abi.has_contiguous_rows(total)
