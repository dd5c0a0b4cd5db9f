"""Launch the kernels for rotary embedding, for the forward and the backward pass.

Only the tables are saved for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.triton.launching import launch, power_of_two

_TILE = 2048  # pairs that a program has at a time


class Rotary(torch.autograd.Function):
    """Rotate a tensor ``[a, b, n, d]`` by tables that broadcast to ``[a, b, n, r]``.

    The backward pass rotates back.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _turned(input, cosine, sine, interleaved, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(grad, cosine, sine, ctx.interleaved, False), None, None, None


def _turned(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, forth: bool) -> Tensor:
    from megatron_npu.ops.triton.kernels import rotary as kernels

    x = input if input.stride(3) == 1 else input.contiguous()
    first, second, heads, size = x.shape
    turned = cosine.size(-1)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    tables = [table.contiguous().expand(first, second, heads, turned) for table in (cosine, sine)]
    half = max(16, power_of_two(turned // 2))
    tall = min(power_of_two(heads), max(1, _TILE // half))
    launch(
        *(kernels.turn, (first * second, -(-heads // tall)), output),
        *(x, *tables, output, second, heads, size, turned),
        *x.stride()[:3],
        *tables[0].stride()[:3],
        *tables[1].stride()[:3],
        *(forth, interleaved, power_of_two(size - turned) if size > turned else 0, tall, half),
        num_warps=4,
    )
    return output
