"""Launch the kernels that compute activation functions with a fused bias, for the forward and the backward
pass.

Only the inputs are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.triton.launching import chunks_of, launch, tile_of
from megatron_npu.ops.triton.sums import new_partial, sum_of_partial

_WARPS = 4  # of GELU: with 8, its gradient took a fifth longer (H200, [16384, 4096] in bf16)


def gelu_of_sum(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``gelu(input + bias)`` in tanh form, without autograd."""
    from megatron_npu.ops.triton.kernels import activation as kernels

    x, width = input.contiguous(), input.size(-1)
    output = torch.empty_like(x)
    rows = x.numel() // max(1, width)
    tall, columns, grid = tile_of(rows, width)
    launch(
        *(kernels.bias_gelu, grid, output),
        *(x, x if bias is None else bias, output, rows, width, bias is not None, tall, columns),
        num_warps=_WARPS,
    )
    return output


class BiasGelu(torch.autograd.Function):
    """Compute GELU (tanh form) of ``input + bias``.

    The backward pass recomputes the sum.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, bias)
        return gelu_of_sum(input, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        from megatron_npu.ops.triton.kernels import activation as kernels

        input, bias = ctx.saved_tensors
        x, grad, width = input.contiguous(), grad.contiguous(), input.size(-1)
        result = torch.empty_like(x)
        rows = x.numel() // max(1, width)
        tall, columns, per, grid = chunks_of(rows, width, x.device)
        partial = result if bias is None else new_partial(x, grid[0], width)
        launch(
            *(kernels.bias_gelu_backward, grid, result),
            *(grad, x, x if bias is None else bias, result, partial, rows, width, per),
            *(bias is not None, tall, columns),
            num_warps=_WARPS,
        )
        return result, None if bias is None else sum_of_partial(partial, bias.dtype)


class Gated(torch.autograd.Function):
    """Compute ``curve(a) * b`` for ``input + bias = [a, b]``, where ``curve`` is ``silu`` or ``gelu``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, curve: str) -> Tensor:
        from megatron_npu.ops.triton.kernels import activation as kernels

        ctx.save_for_backward(input, bias)
        ctx.silu = curve == "silu"
        x, half = input.contiguous(), input.size(-1) // 2
        output = x.new_empty((*x.shape[:-1], half))
        rows = x.numel() // max(1, 2 * half)
        tall, columns, grid = tile_of(rows, half)
        launch(
            *(kernels.gated, grid, output),
            *(x, x if bias is None else bias, output, rows, half, ctx.silu, bias is not None, tall, columns),
            num_warps=8,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from megatron_npu.ops.triton.kernels import activation as kernels

        input, bias = ctx.saved_tensors
        x, grad, half = input.contiguous(), grad.contiguous(), input.size(-1) // 2
        result = torch.empty_like(x)
        rows = x.numel() // max(1, 2 * half)
        tall, columns, per, grid = chunks_of(rows, half, x.device)
        partial = result if bias is None else new_partial(x, grid[0], 2 * half)
        launch(
            *(kernels.gated_backward, grid, result),
            *(grad, x, x if bias is None else bias, result, partial, rows, half, per),
            *(ctx.silu, bias is not None, tall, columns),
            num_warps=8,
        )
        return result, None if bias is None else sum_of_partial(partial, bias.dtype), None
