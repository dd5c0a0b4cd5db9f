"""Launch the kernels for layer norm and RMS norm, optionally fused with the addition of a residual.

The same kernel writes partial sums over rows for the gradients of weight and bias, which a second kernel adds
up. If ``bias`` is None, the norm is an RMS norm throughout this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.triton.draws import Dropped
from megatron_npu.ops.triton.launching import launch, power_of_two, processors
from megatron_npu.ops.triton.sums import new_partial, sum_of_partial

WIDEST = 1 << 14  # values of a row, which a program holds whole
_TILE = 2048
_PER_PROCESSOR = 4  # programs, each with its partial sums

Keep = Callable[[Tensor, Tensor], bool]
Gradients = tuple[Tensor | None, ...]


class Scale(NamedTuple):
    """Scale and shift of a norm: the normalized row is multiplied by ``weight``, and ``bias`` is added.

    Attributes:
        weight: ``[h]``.
        bias: ``[h]``; None means that the norm is an RMS norm.
        eps: added to the variance.
        centered: whether the factor is ``1 + weight``.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool


class Residual(NamedTuple):
    """The residual input of a norm, which then normalizes ``residual + dropout(x + shift)``.

    Attributes:
        residual: like the input.
        shift: ``[h]``, or None.
        dropped: the dropout's draw. If None, nothing is dropped.
        total: the tensor to which the sum is written.
    """

    residual: Tensor
    shift: Tensor | None
    dropped: Dropped | None
    total: Tensor


class Kept(NamedTuple):
    """Tensors for the backward pass: the norm's input, means (layer norm), reciprocal deviations."""

    x: Tensor
    means: Tensor
    rstds: Tensor


@functools.lru_cache(maxsize=64)
def _cut(rows: int, width: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return a tile's rows and columns, the rows per program in the backward pass, and the number of
    warps.
    """
    columns = max(16, power_of_two(width))
    tall = min(max(1, _TILE // columns), power_of_two(rows))
    tiles = -(-rows // tall)
    per = -(-tiles // (_PER_PROCESSOR * processors(device))) * tall
    return tall, columns, per, min(16, max(4, tall * columns // 512))


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.size(-1))


class Norm(torch.autograd.Function):
    """Compute layer norm or RMS norm, saving the input for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
    ) -> Tensor:
        x = input.contiguous()
        output = torch.empty_like(x)
        ctx.save_for_backward(*forward(x, Scale(weight, bias, eps, centered), output), weight)
        ctx.layer, ctx.centered = bias is not None, centered
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        *kept, weight = ctx.saved_tensors
        d_x, _, partial = backward(ctx, grad, None, Kept(*kept), weight)
        if not ctx.layer:
            return d_x, sum_of_partial(partial, weight.dtype), None, None, None
        if ctx.bias_dtype is weight.dtype:
            both = sum_of_partial(partial, weight.dtype)
        else:
            both = sum_of_partial(partial, torch.float32)
        d_weight, d_bias = both.chunk(2)
        return d_x, d_weight.to(weight.dtype), d_bias.to(ctx.bias_dtype), None, None


def forward(x: Tensor, scale: Scale, output: Tensor, added: Residual | None = None) -> Kept:
    """Write the norm of ``x``, or of the sum of ``x`` and a residual, to ``output``.

    Return the tensors for the backward pass.
    """
    from megatron_npu.ops.triton.kernels import norm as kernels

    weight, bias, eps, centered = scale
    residual, shift, dropped, total = added or (None,) * 4
    width, rows = x.size(-1), _rows(x)
    tall, columns, _, warps = _cut(rows, width, x.device)
    rstds = torch.empty(rows, dtype=torch.float32, device=x.device)
    means = rstds if bias is None else torch.empty_like(rstds)
    launch(
        *(kernels.forward, (-(-rows // tall),), output),
        *(x, _or(shift, x), _or(residual, x), _or(total, output), x if dropped is None else dropped.seed),
        *(weight, _or(bias, weight), output, means, rstds, rows, width, eps),
        *((0, 1.0) if dropped is None else (dropped.level, dropped.scale)),
        *(bias is not None, centered, residual is not None, shift is not None, dropped is not None),
        *(tall, columns),
        num_warps=warps,
    )
    return Kept(_or(total, x), means, rstds)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the given tensor or, if it is None, a placeholder that the kernel does not read."""
    return other if tensor is None else tensor


def backward(
    ctx: Any,
    grad: Tensor,
    of_total: Tensor | None,
    kept: Kept,
    weight: Tensor,
    dropped: Dropped | None = None,
    shifted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the norm's input and of the dropout's input, and partial sums for the
    weights' gradients.
    """
    from megatron_npu.ops.triton.kernels import norm as kernels

    x, means, rstds = kept
    width, rows, grad = x.size(-1), _rows(x), grad.contiguous()
    of_total = None if of_total is None else of_total.contiguous()
    tall, columns, per, warps = _cut(rows, width, x.device)
    d_x = torch.empty_like(x)
    d_added = d_x if dropped is None else torch.empty_like(x)
    chunks = -(-rows // per) if per else 0
    partial = new_partial(x, chunks, width * (1 + ctx.layer + shifted))
    launch(
        *(kernels.backward, (chunks,), d_x),
        *(grad, _or(of_total, x), x, weight, means, rstds, d_x, d_added),
        *(x if dropped is None else dropped.seed, partial, rows, width, per),
        *((0, 1.0) if dropped is None else (dropped.level, dropped.scale)),
        *(ctx.layer, ctx.centered, of_total is not None, shifted, dropped is not None, tall, columns),
        num_warps=warps,
    )
    return d_x, d_added, partial
