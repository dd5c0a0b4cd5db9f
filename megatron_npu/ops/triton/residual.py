"""Launch the kernels that add a bias, apply dropout and add a residual, alone or fused with the following
norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.triton import norm
from megatron_npu.ops.triton.draws import Dropped, drawn
from megatron_npu.ops.triton.launching import chunks_of, launch, tile_of
from megatron_npu.ops.triton.sums import new_partial, sum_of_partial, sum_of_rows

Gradients = tuple[Tensor | None, ...]
# Given a parameter and its fp32 gradient; True if it will be added to the parameter's gradient buffer.
Keep = Callable[[Tensor, Tensor], bool]


class BiasDropoutAdd(torch.autograd.Function):
    """Compute ``residual + dropout(x + bias)``.

    The backward pass draws the same dropout mask again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        from megatron_npu.ops.triton.kernels import dropout as kernels

        dropped = drawn(p, x.device)
        ctx.save_for_backward(bias, None if dropped is None else dropped.seed)
        ctx.dropped = None if dropped is None else dropped[1:]
        x, residual, width = x.contiguous(), residual.contiguous(), x.size(-1)
        output = torch.empty_like(x)
        rows = x.numel() // max(1, width)
        tall, columns, grid = tile_of(rows, width)
        launch(
            *(kernels.bias_dropout_add, grid, output),
            *(x, x if bias is None else bias, residual, output, x if dropped is None else dropped.seed),
            *(rows, width, *((0, 1.0) if dropped is None else dropped[1:])),
            *(bias is not None, dropped is not None, tall, columns),
            num_warps=8,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        from megatron_npu.ops.triton.kernels import dropout as kernels

        bias, seed = ctx.saved_tensors
        if seed is None:
            return grad, None if bias is None else sum_of_rows(grad, bias.dtype), grad, None
        g, width = grad.contiguous(), grad.size(-1)
        d_x = torch.empty_like(g)
        rows = g.numel() // max(1, width)
        tall, columns, per, grid = chunks_of(rows, width, g.device)
        partial = d_x if bias is None else new_partial(g, grid[0], width)
        launch(
            *(kernels.dropped_gradient, grid, d_x),
            *(g, d_x, partial, seed, rows, width, per, *ctx.dropped, bias is not None, tall, columns),
            num_warps=8,
        )
        return d_x, None if bias is None else sum_of_partial(partial, bias.dtype), grad, None


class AddNorm(torch.autograd.Function):
    """Compute the norm of ``residual + dropout(x + shift)``, and return both the norm and the sum.

    If ``bias`` is None, the norm is an RMS norm. Only the sum is saved, which is the next layer's residual
    anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        keep: Keep | None,
        shift: Tensor | None,
        p: float,
    ) -> tuple[Tensor, Tensor]:
        dropped = drawn(p, x.device)
        x, residual = x.contiguous(), residual.contiguous()
        output, total = torch.empty_like(x), torch.empty_like(x)
        added = norm.Residual(residual, shift, dropped, total)
        kept = norm.forward(x, norm.Scale(weight, bias, eps, centered), output, added)
        ctx.save_for_backward(*kept, weight, None if dropped is None else dropped.seed)
        ctx.dropped = None if dropped is None else dropped[1:]
        ctx.layer, ctx.centered, ctx.keep = bias is not None, centered, keep
        ctx.parameters = [each for each in (weight, bias, shift) if each is not None]
        ctx.shifted = shift is not None
        ctx.set_materialize_grads(False)
        return output, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_total: Tensor | None) -> Gradients:
        *kept, weight, seed = ctx.saved_tensors
        if grad is None:
            if of_total is None:
                return (None,) * 9
            grad = torch.zeros_like(kept[0])
        dropped = None if seed is None else Dropped(seed, *ctx.dropped)
        d_total, d_x, partial = norm.backward(
            ctx, grad, of_total, norm.Kept(*kept), weight, dropped, ctx.shifted
        )
        found = iter(_of_parameters(ctx, partial))
        d_weight, d_bias = next(found), next(found) if ctx.layer else None
        return d_x, d_total, d_weight, d_bias, None, None, None, next(found) if ctx.shifted else None, None


def _of_parameters(ctx: Any, partial: Tensor) -> list[Tensor | None]:
    """Return the gradients in the dtypes of their parameters, with None for each gradient that ``keep``
    accepts.

    ``keep`` receives the parameters themselves, because those from autograd lack attributes if saved tensors
    are moved.
    """
    dtypes = {parameter.dtype for parameter in ctx.parameters}
    narrow = len(dtypes) == 1 and ctx.keep is None
    sums = sum_of_partial(partial, dtypes.pop() if narrow else torch.float32)
    pairs = zip(ctx.parameters, sums.chunk(len(ctx.parameters)), strict=True)
    return [
        None if ctx.keep is not None and ctx.keep(parameter, grad) else grad.to(parameter.dtype)
        for parameter, grad in pairs
    ]
