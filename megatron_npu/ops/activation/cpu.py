"""Compute GELU of ``input + bias`` on the CPU, with one exponential for both the value and the derivative."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import compiled
from megatron_npu.ops.activation import native, reference
from megatron_npu.ops.products.bias_gradient import bias_gradient
from megatron_npu.ops.tiling import scratch_buffers

# Values of a tile, for all threads together: it is worth the start of fifteen steps on it, and three buffers
# of it in fp32 are not much more than the caches of two cores (measured on an EPYC with AVX512).
_TILE = 3 << 17
_FEWEST = 1 << 14  # values of a call that is worth them
# 1 + tanh(u) = 2 / (1 + e⁻²ᵘ), of which the exponent of two is z · (_LINEAR + _CUBIC · z²)
_LINEAR = -2 * math.log2(math.e) * reference.K
_CUBIC = _LINEAR * reference.C


class BiasGelu(torch.autograd.Function):
    """Compute GELU (tanh form) of ``input + bias``, and store its derivative in the input's memory for the
    backward pass.

    torch's CPU kernels spend most of their time on tanh, which they compute in the forward pass and again in
    the backward pass: on an EPYC with AVX512 they take up to 1.5 times as long in bf16. The derivative is
    rounded like the output. In fp32 only our compiled kernel is faster than torch.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        output, slope = gelu_and_slope(input, bias)
        ctx.save_for_backward(slope, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        slope, bias = ctx.saved_tensors
        if bias is not None and compiled.usable(grad, slope):
            result, sums = compiled.product_and_sum(grad, slope)
            return result, sums.to(bias.dtype)
        result = grad * slope
        return result, bias_gradient(result, bias)


def gelu_and_slope(
    input: Tensor, bias: Tensor | None, with_slope: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return ``gelu(z)`` (tanh form) and its derivative for ``z = input + bias``, without rounding ``z``.

    With ``s = 1 / (1 + e⁻²ᵘ)`` they are ``z·s`` and ``s + z·s·(1 - s)·2u'``, computed in fp32 (fp64 for
    fp64).

    Args:
        input: ``[..., h]``; both results have its shape and dtype.
        bias: ``[h]``, or None.
        with_slope: whether to return the derivative.
    """
    if compiled.usable(input):
        return compiled.gelu(input, bias, with_slope)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    slope = torch.empty_like(output) if with_slope else None
    rows = input.resolve_neg().reshape(-1, input.size(-1))  # torch 2.13's copy_ to fp32 forgets the sign
    outputs, slopes = output.view(rows.shape), None if slope is None else slope.view(rows.shape)
    tiles = -(-rows.numel() // _TILE)
    step = -(-rows.size(0) // max(1, tiles))
    exact = torch.promote_types(input.dtype, torch.float32)
    bias = None if bias is None else bias.to(exact)
    x, s, t = scratch_buffers(3, rows, exact, step)
    linear, steepness, one = (torch.tensor(value, dtype=exact) for value in (_LINEAR, 2 * reference.K, 1.0))
    for start in range(0, rows.size(0), max(1, step)):
        part = slice(start, start + step)
        if x.size(0) > rows.size(0) - start:
            x, s, t = (buffer[: rows.size(0) - start] for buffer in (x, s, t))
        x.copy_(rows[part])
        if bias is not None:
            x.add_(bias)
        torch.mul(x, x, out=t)
        torch.add(linear, t, alpha=_CUBIC, out=s).mul_(x).exp2_().add_(1).reciprocal_()
        outputs[part] = x.mul_(s)
        if slopes is not None:
            torch.add(steepness, t, alpha=6 * reference.K * reference.C, out=t).mul_(x)
            t.nan_to_num_(0.0, 0.0, 0.0)  # the cube of what is far out: the slope there is `s`
            torch.sub(one, s, out=x)
            slopes[part] = t.mul_(x).add_(s)
    return output, slope


@reference.bias_gelu.on("cpu", note="a kernel of ours⁴ for forward and backward at once; fp16 with `exp2`")
def _bias_gelu(input: Tensor, bias: Tensor | None) -> Tensor:
    # whether gradients are asked for decides nothing: activations that are computed again are the same bits
    worth = input.dtype.itemsize <= 2 or compiled.usable(input)
    plain = bias is None or bias.shape == input.shape[-1:]  # torch refuses another, or repeats its one value
    if not plain or not worth or input.numel() < _FEWEST or torch.compiler.is_compiling():
        return native.torch_bias_gelu(input, bias)
    if torch.is_grad_enabled():
        return BiasGelu.apply(input, bias)
    return gelu_and_slope(input, bias, with_slope=False)[0]
