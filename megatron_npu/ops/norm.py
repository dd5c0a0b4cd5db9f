"""Compute layer norm and RMS norm over the last dimension, with fp32 statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import compiled
from megatron_npu.ops.dispatch import Make, Operation, takes_kernel, unsupported_dtype
from megatron_npu.ops.tiling import row_slices
from megatron_npu.ops.triton import norm as triton_norm

# A factor of zero has lost its input: below this the memory-efficient backward divides by this instead.
_SMALLEST_FACTOR = 1e-5


def layer_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016) with the biased variance.

    Args:
        input: ``[..., h]``, fp32, bf16 or fp16.
        weight: ``[h]``, of the dtype of ``input`` or fp32.
        bias: ``[h]``, like ``weight``.
        eps: added to the variance.
        zero_centered_gamma: whether the factor is ``1 + weight`` (Megatron's ``--apply-layernorm-1p``).
        memory_efficient: whether to save the output for backward, which the next layer saves anyway, instead
            of the input (apex's option of that name); the gradient then includes the output's rounding error.

    Returns:
        ``[..., h]`` in the dtype of ``input``; mean, variance and the sums over rows in backward are in fp32.
    """
    if memory_efficient:
        return _FromOutput.apply(input, weight, bias, eps, zero_centered_gamma)
    return _layer_norm(input, weight, bias, eps, zero_centered_gamma)


def rms_norm(
    input: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` (Zhang and Sennrich 2019).

    The arguments are those of ``layer_norm``.
    """
    if memory_efficient:
        return _FromOutput.apply(input, weight, None, eps, zero_centered_gamma)
    return _rms_norm(input, weight, eps, zero_centered_gamma)


def norm_of_residual(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute the norm at the start of a Megatron layer: layer norm if there is a bias, otherwise RMS norm.

    For an fp32 residual (``--fp32-residual-connection``) the result has the weight's 16-bit dtype, which the
    next matmul expects. The arguments are those of ``layer_norm``.
    """
    if input.dtype is torch.float32 and weight.dtype is not torch.float32:
        return mixed_norm(input, weight, bias, eps, zero_centered_gamma, memory_efficient)
    if bias is None:
        return rms_norm(input, weight, eps, zero_centered_gamma, memory_efficient)
    return layer_norm(input, weight, bias, eps, zero_centered_gamma, memory_efficient)


def mixed_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute ``layer_norm``, and return it in the weight's dtype, as apex's mixed-precision kernels do."""
    scale, shift = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    result = norm_of_residual(input, scale, shift, eps, zero_centered_gamma, memory_efficient)
    return result.to(weight.dtype)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return 1 + weight if zero_centered else weight


def _precise(input: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32))


def _layer_norm_reference(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    x = _precise(input)
    centered = x - x.mean(-1, keepdim=True)
    normal = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (normal * _factor(weight, zero_centered) + bias).to(input.dtype)


def _rms_norm_reference(input: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    x = _precise(input)
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normal * _factor(weight, zero_centered)).to(input.dtype)


_layer_norm = Operation("layer_norm", _layer_norm_reference, group="norm")
_rms_norm = Operation("rms_norm", _rms_norm_reference, group="norm")


def _mixed_dtypes(input: Tensor, weight: Tensor, *_: Any) -> str | None:
    if weight.dtype is not input.dtype:
        return f"the weight is {weight.dtype}, but the input is {input.dtype}"
    return None


@_layer_norm.on(
    "npu", supports=_mixed_dtypes, note="`F.layer_norm`", limits="weight in the dtype of the input"
)
def _layer_norm_native(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    return F.layer_norm(input, weight.shape, _factor(weight, zero_centered), bias, eps)


_ON_CUDA = "one Triton kernel per direction⁶, else {}; for a weight of another dtype the reference"


@_layer_norm.on("cuda", note=_ON_CUDA.format("`F.layer_norm`"))
def _layer_norm_cuda(input: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if takes_kernel("layer_norm", input, weight, bias, beyond=beyond_kernel(input, weight)):
        return triton_norm.Norm.apply(input, weight, bias, eps, zero_centered)
    mixed = _mixed_dtypes(input, weight)
    return (_layer_norm_reference if mixed else _layer_norm_native)(input, weight, bias, eps, zero_centered)


@_rms_norm.on("cuda", note=_ON_CUDA.format("`F.rms_norm`"))
def _rms_norm_cuda(input: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if takes_kernel("rms_norm", input, weight, beyond=beyond_kernel(input, weight)):
        return triton_norm.Norm.apply(input, weight, None, eps, zero_centered)
    if _mixed_dtypes(input, weight):
        return _rms_norm_reference(input, weight, eps, zero_centered)
    return F.rms_norm(input, weight.shape, _factor(weight, zero_centered), eps)


def beyond_kernel(input: Tensor, weight: Tensor) -> str | None:
    """Return the reason why our Triton norm kernel does not support the given tensors, or None if it does."""
    if weight.shape != input.shape[-1:]:
        return f"the weight {tuple(weight.shape)} does not match the last dimension of {tuple(input.shape)}"
    if input.size(-1) > triton_norm.WIDEST:
        return f"rows of {input.size(-1)} values are wider than {triton_norm.WIDEST}"
    return None


@_layer_norm.on("cpu", note="torch's kernel¹; backward: ours⁴ for bf16, fp32 tiles for fp16")
def _layer_norm_cpu(input: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    # the sums over rows of torch's backward depend on the number of threads
    any_order = not torch.are_deterministic_algorithms_enabled()
    if any_order and not zero_centered and input.dtype is weight.dtype is bias.dtype is torch.float32:
        return F.layer_norm(input, weight.shape, weight, bias, eps)
    return _CpuNorm.apply(input, weight, bias, eps, zero_centered)


@_rms_norm.on("cpu", note="tiles; backward with a kernel of ours⁴ or the layer-norm kernel")
def _rms_norm_cpu(input: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _CpuNorm.apply(input, weight, None, eps, zero_centered)


def _beyond_npu(input: Tensor, weight: Tensor, *rest: Any) -> str | None:
    if not 2 <= input.dim() <= 8:
        return f"npu_rms_norm supports 2 to 8 dimensions, but the input has {input.dim()}"
    return unsupported_dtype("npu_rms_norm", input.dtype) or _mixed_dtypes(input, weight, *rest)


@_rms_norm.on(
    "npu",
    supports=_beyond_npu,
    note="`npu_rms_norm`",
    limits="2 to 8 dimensions, weight in the dtype of the input",
)
def _rms_norm_npu(input: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    import torch_npu

    return torch_npu.npu_rms_norm(input, _factor(weight, zero_centered), epsilon=eps)[0]


class _CpuNorm(torch.autograd.Function):
    """Compute layer norm or RMS norm on a CPU.

    If ``bias`` is None, it is an RMS norm, for which torch has no kernel.

    torch's layer norm kernel rounds statistics to 16 bits and sums 16-bit weight gradients in 16 bits: over
    4,096 rows of bf16 they are 10 % off. Its fp32 kernel therefore processes fp32 copies of pieces.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
    ) -> Tensor:
        x = input.reshape(-1, input.size(-1))
        factor = _factor(_precise(weight), zero_centered)
        if bias is None:
            output, rstd = _rms_forward(x, factor, eps)
            mean = torch.zeros_like(rstd)
        else:
            output, mean, rstd = torch.native_layer_norm(x, factor.shape, factor, _precise(bias), eps)
        ctx.save_for_backward(input, weight, mean, rstd)
        ctx.zero_centered, ctx.bias_dtype = zero_centered, None if bias is None else bias.dtype
        return output.resize_(input.shape)  # not a view: those cannot be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, rstd = ctx.saved_tensors
        factor = _factor(_precise(weight), ctx.zero_centered)
        x, dy = (t.reshape(-1, t.size(-1)) for t in (input, grad))
        rms = ctx.bias_dtype is None
        if factor.dtype is torch.float32 and compiled.usable(x, dy):
            dx, d_weight, d_bias = compiled.norm_backward(dy, x, None if rms else mean, rstd, factor)
        elif x.dtype is factor.dtype:
            dx, d_weight, d_bias = _norm_backward(dy, x, mean, rstd, factor, rms)
        else:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            d_weight, d_bias = torch.zeros_like(factor), torch.zeros_like(factor)
            for rows in row_slices(*x.shape):
                tensors = (dy[rows].to(factor.dtype), x[rows].to(factor.dtype), mean[rows], rstd[rows])
                piece, of_weight, of_bias = _norm_backward(*tensors, factor, rms)
                dx[rows] = piece
                d_weight += of_weight
                d_bias += of_bias
        bias = None if rms or d_bias is None else d_bias.to(ctx.bias_dtype)
        return dx.view(input.shape), d_weight.to(weight.dtype), bias, None, None


def _norm_backward(
    grad: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, factor: Tensor, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, factor and bias with torch's layer-norm kernel.

    All tensors have the same dtype.
    """
    sums = not torch.are_deterministic_algorithms_enabled()  # torch's depend on the number of threads
    dx, d_factor, d_bias = torch.ops.aten.native_layer_norm_backward(
        grad, input, factor.shape, mean, rstd, factor, factor, [True, sums, sums]
    )
    if not sums:
        d_factor, d_bias = (grad * ((input - mean) * rstd)).sum(0), grad.sum(0)
    if rms:  # only layer norm subtracts the mean, so only it loses this part
        dx.add_((grad @ factor).div_(input.size(-1))[:, None] * rstd)
    return dx, d_factor, d_bias


def _rms_forward(x: Tensor, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of a tensor ``[n, h]``, and the inverse of its root mean square, ``[n, 1]``."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty((x.size(0), 1), dtype=factor.dtype, device=x.device)
    for rows in row_slices(*x.shape):
        norm = torch.linalg.vector_norm(x[rows], dim=-1, keepdim=True, dtype=factor.dtype)
        rstd[rows] = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        torch.mul(x[rows] * rstd[rows], factor, out=output[rows])
    return output, rstd


class _FromOutput(torch.autograd.Function):
    """Compute layer norm or RMS norm, saving the output instead of the input for the backward pass.

    The normalized input is ``(output - bias) / factor``. If ``bias`` is None, it is an RMS norm.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
    ) -> Tensor:
        if bias is None:
            output = _rms_norm(input, weight, eps, zero_centered)
            square = _precise(input).square().mean(-1, keepdim=True)
        else:
            output = _layer_norm(input, weight, bias, eps, zero_centered)
            square = _precise(input).var(-1, correction=0, keepdim=True)
        ctx.save_for_backward(output, weight, bias, torch.rsqrt(square + eps))
        ctx.zero_centered = zero_centered
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, weight, bias, rstd = ctx.saved_tensors
        factor = _factor(_precise(weight), ctx.zero_centered)
        divisor = torch.where(factor.abs() < _SMALLEST_FACTOR, _SMALLEST_FACTOR, factor)
        dy = _precise(grad)
        normal = (_precise(output) if bias is None else _precise(output) - bias) / divisor
        scaled = dy * factor
        dx = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
        if bias is not None:
            dx -= scaled.mean(-1, keepdim=True)
        rows = tuple(range(output.dim() - 1))
        d_weight = (dy * normal).sum(rows).to(weight.dtype)
        d_bias = None if bias is None else dy.sum(rows).to(bias.dtype)
        return dx.mul_(rstd).to(output.dtype), d_weight, d_bias, None, None


@_layer_norm.example()
def _layer_norm_example(make: Make) -> Tensor:
    return layer_norm(make(64, 2, 128), make(128), make(128), 1e-5)


@_rms_norm.example()
def _rms_norm_example(make: Make) -> Tensor:
    return rms_norm(make(64, 2, 128), make(128), 1e-5)
