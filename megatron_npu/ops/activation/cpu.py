"""Activations on a CPU: chains of simple kernels, in fp32, on tiles that stay in a core's cache.

torch's kernel for the tanh form of GELU evaluates a slower tanh than ``torch.tanh``, and on 16 bits every
kernel converts: a chain on one fp32 tile wins although it has more steps. Buffers are used again.

Forward keeps the slope for backward in place of the input, which nothing else needs: the same memory, and the
curve is evaluated once. With 16 bits the slope is rounded: a gradient is within two roundings of the exact
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops.activation import reference
from megatron_npu.ops.activation.native import Gated
from megatron_npu.ops.activation.reference import C, K
from megatron_npu.ops.tiling import row_tiles, scratch_buffers

# Elements up to which, without gradients, starting the steps of the chain takes longer than torch's one
# kernel: the rows of a few texts that grow by a token.
_FEW = 1 << 15


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.size(-1))


def _precise(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return the bias in fp32, ``[h]``; zeros where there is none."""
    dtype = torch.promote_types(input.dtype, torch.float32)
    return torch.zeros(input.size(-1), dtype=dtype) if bias is None else bias.to(dtype)


def _needs_slope(input: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))


def _store(product: Tensor, output: Tensor, d_bias: Tensor | None) -> None:
    """Round a finished tile of the gradient, and add it to the bias's before that."""
    if product is not output:
        output.copy_(product)
    if d_bias is not None:
        d_bias += product.sum(0)


class _BiasGelu(torch.autograd.Function):
    """The tanh form on w = K·(input + bias), in which the polynomial has one coefficient less.

    With t the tanh, and p = z·d(its argument)/dz, the slope is (1 + t)/2 · (1 + p·(1 - t)).
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, needs_slope: bool) -> Tensor:
        shift = _precise(input, bias) * K
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        slopes = torch.empty_like(output) if needs_slope else output
        half = torch.tensor(0.5, dtype=shift.dtype)
        in_place = output.dtype is shift.dtype
        buffers = scratch_buffers(2 if in_place else 4, output, shift.dtype)
        for x, out, slope in row_tiles(_rows(input), _rows(output), _rows(slopes)):
            w, t, *others = (buffer[: x.size(0)] for buffer in buffers)
            p, h = (out, slope) if in_place else others  # what is written last holds what comes before
            torch.add(shift, x, alpha=K, out=w)
            torch.mul(w, w, out=p)
            torch.addcmul(w, w, p, value=C / K**2, out=t)
            torch.tanh(t, out=t)
            if needs_slope:
                torch.addcmul(w, w, p, value=3 * C / K**2, out=p)
                torch.addcmul(p, p, t, value=-1, out=p)
                torch.add(half, t, alpha=0.5, out=h)
                torch.addcmul(h, h, p, out=slope)
            torch.addcmul(w, w, t, out=t)
            torch.mul(t, 0.5 / K, out=out)
        if needs_slope:
            ctx.save_for_backward(slopes, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        slopes, bias = ctx.saved_tensors
        output = torch.empty_like(slopes)
        if bias is None:
            return torch.mul(slopes, grad, out=output), None, None
        d_bias = torch.zeros_like(_precise(slopes, bias))
        (buffer,) = scratch_buffers(1, output, d_bias.dtype)
        for slope, g, out in row_tiles(_rows(slopes), _rows(grad), _rows(output)):
            product = out if out.dtype is d_bias.dtype else buffer[: out.size(0)]
            _store(torch.mul(slope, g, out=product), out, d_bias)
        return output, d_bias.to(bias.dtype), None


@reference.bias_gelu.on("cpu", note="chain in tiles")
def _bias_gelu(input: Tensor, bias: Tensor | None) -> Tensor:
    if _needs_slope(input, bias):
        return _BiasGelu.apply(input, bias, True)
    if input.numel() <= _FEW and input.dtype is torch.float32 and (bias is None or bias.dtype is input.dtype):
        shifted = input if bias is None else input + bias
        return torch.nn.functional.gelu(shifted, approximate="tanh")
    return _BiasGelu.forward(None, input, bias, False)  # autograd would cost more than one token's row


# Writes the activation of z, and its slope unless that is None; z is left as it is, spare is not.
Curve = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]


def _gelu(z: Tensor, spare: Tensor, value: Tensor, slope: Tensor | None) -> None:
    """The formulas of ``_BiasGelu``."""
    torch.mul(z, z, out=spare)
    torch.addcmul(z, z, spare, value=C, out=value).mul_(K)
    torch.tanh(value, out=value)
    if slope is not None:
        torch.addcmul(z, z, spare, value=3 * C, out=spare).mul_(K)
        torch.addcmul(spare, spare, value, value=-1, out=spare)
        torch.add(value, 1, out=slope).mul_(0.5)
        torch.addcmul(slope, slope, spare, out=slope)
    torch.addcmul(z, z, value, out=value).mul_(0.5)


def _silu(z: Tensor, spare: Tensor, value: Tensor, slope: Tensor | None) -> None:
    """With s = sigmoid(z): value v = z·s, slope s + v - v·s."""
    torch.sigmoid(z, out=spare)
    torch.mul(z, spare, out=value)
    if slope is not None:
        torch.addcmul(spare, value, spare, value=-1, out=slope).add_(value)


class _Gated(torch.autograd.Function):
    """``curve(a) * b`` for ``input + bias = [a, b]``; kept is the slope for each of the two."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, curve: Curve, needs_slope: bool) -> Tensor:
        gate_bias, value_bias = _precise(input, bias).chunk(2)
        output = input.new_empty((*input.shape[:-1], input.size(-1) // 2))
        slopes = torch.empty_like(input, memory_format=torch.contiguous_format) if needs_slope else input
        buffers = scratch_buffers(4, output, gate_bias.dtype)
        halves = (*_rows(input).chunk(2, -1), *_rows(slopes).chunk(2, -1))
        for out, gate, value, gate_slope, value_slope in row_tiles(_rows(output), *halves):
            z, spare, curved, slope = (buffer[: out.size(0)] for buffer in buffers)
            spare = out if out.dtype is z.dtype else spare
            torch.add(gate_bias, gate, out=z)
            curve(z, spare, curved, slope if needs_slope else None)
            torch.add(value_bias, value, out=z)
            torch.mul(z, curved, out=out)
            if needs_slope:
                torch.mul(z, slope, out=gate_slope)
                value_slope.copy_(curved)
        if needs_slope:
            ctx.save_for_backward(slopes, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        slopes, bias = ctx.saved_tensors
        output = torch.empty_like(slopes)
        d_bias = None if bias is None else torch.zeros_like(_precise(slopes, bias))
        d_biases = (None, None) if d_bias is None else d_bias.chunk(2)
        (buffer,) = scratch_buffers(1, grad, torch.promote_types(grad.dtype, torch.float32))
        halves = (*_rows(slopes).chunk(2, -1), *_rows(output).chunk(2, -1))
        for g, *slope, d_gate, d_value in row_tiles(_rows(grad), *halves):
            for part, out, bias_part in zip(slope, (d_gate, d_value), d_biases, strict=True):
                product = out if out.dtype is buffer.dtype else buffer[: out.size(0)]
                _store(torch.mul(part, g, out=product), out, bias_part)
        return output, None if d_bias is None else d_bias.to(bias.dtype), None, None


@reference.swiglu.on("cpu", note="`F.silu`; with a bias a chain in tiles")
def _swiglu(input: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return Gated.apply(input, None, "silu")  # two of torch's fast kernels: a chain is no better
    return _Gated.apply(input, bias, _silu, _needs_slope(input, bias))


@reference.geglu.on("cpu", note="chain in tiles")
def _geglu(input: Tensor, bias: Tensor | None) -> Tensor:
    return _Gated.apply(input, bias, _gelu, _needs_slope(input, bias))
