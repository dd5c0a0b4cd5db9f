"""Add a residual, compute the layer norm or RMS norm of the sum, and return both the sum and its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_npu.ops import norm
from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.ops.dispatch import Make, Operation, takes_kernel, unsupported_dtype
from megatron_npu.ops.dropout import dropout
from megatron_npu.ops.triton.residual import AddNorm

_NPU_EPSILON = 1e-5  # the only one that aclnnAddLayerNorm takes

# Given a parameter and its fp32 gradient; True if it will be added to the parameter's gradient buffer.
Keep = Callable[[Tensor, Tensor], bool]

_RESULT = "megatron_npu_normalised"  # of a sum: the norm that will read it, and its result


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centered_gamma: bool = False,
    keep: Keep | None = None,
    shift: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``residual + dropout(x + shift)``, and the sum itself; see
    ``norm.layer_norm``.

    Args:
        x: ``[..., h]``, fp32, bf16 or fp16.
        residual: like ``x``.
        weight: ``[h]``, of the dtype of ``x``.
        bias: like ``weight``.
        eps: added to the variance.
        zero_centered_gamma: whether the factor is ``1 + weight``.
        keep: an object that accumulates parameter gradients in fp32; a gradient that it accepts is not passed
            to autograd. Devices that compute the gradient only in the parameter's dtype do not call it.
        shift: ``[h]``, a bias for ``x``; None means no bias.
        p: the probability of dropping a value, as in ``dropout.dropout`` in training.

    Returns:
        Both results, ``[..., h]`` in the dtype of ``x``.
    """
    return _add_layer_norm(x, residual, weight, bias, eps, zero_centered_gamma, keep, shift, p)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered_gamma: bool = False,
    keep: Keep | None = None,
    shift: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``residual + dropout(x + shift)``, and the sum itself.

    The arguments are those of ``add_layer_norm``.
    """
    return _add_rms_norm(x, residual, weight, eps, zero_centered_gamma, keep, shift, p)


def hand_on(total: Tensor, reader: Any, result: Tensor) -> None:
    """Store a precomputed norm on the tensor ``total``, from which the module ``reader`` can fetch it."""
    setattr(total, _RESULT, (reader, result))


def result_of(reader: Any, input: Tensor) -> Tensor | None:
    """Return and remove the norm that is stored on ``input`` for the module ``reader``.

    The result is returned only once to free its memory.
    """
    found = getattr(input, _RESULT, None)
    if found is None:
        return None
    delattr(input, _RESULT)
    norm, result = found
    return result if norm is reader else None


def _dropped(x: Tensor, shift: Tensor | None, p: float) -> Tensor:
    return dropout(x if shift is None else x + shift, p, True)


def _draws(*arguments: Any) -> bool:
    return bool(arguments[-1])  # p


def _layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centered: bool,
    keep: Keep | None,
    shift: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor]:
    total = _dropped(x, shift, p) + residual
    return norm.layer_norm(total, weight, bias, eps, zero_centered), total


def _rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    keep: Keep | None,
    shift: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor]:
    total = _dropped(x, shift, p) + residual
    return norm.rms_norm(total, weight, eps, zero_centered), total


_add_layer_norm = Operation(
    "add_layer_norm", _layer_norm_reference, group="norm", draws=_draws, rounds_within=True
)
_add_rms_norm = Operation("add_rms_norm", _rms_norm_reference, group="norm", draws=_draws, rounds_within=True)
_add_layer_norm.on("cpu", note="a sum and `layer_norm`")(_layer_norm_reference)
_add_rms_norm.on("cpu", note="a sum and `rms_norm`")(_rms_norm_reference)


def beyond_kernel(x: Tensor, residual: Tensor, weight: Tensor, shift: Tensor | None) -> str | None:
    """Return the reason why our Triton kernel for residual sum and norm does not support the tensors, or
    None.
    """
    if x.shape != residual.shape or x.dtype is not residual.dtype:
        return (
            f"the residual {residual.dtype} {tuple(residual.shape)} does not match the other summand, "
            f"which is {x.dtype}"
        )
    if shift is not None and shift.shape != x.shape[-1:]:
        return f"the bias {tuple(shift.shape)} does not match the last dimension of {tuple(x.shape)}"
    return norm.beyond_kernel(x, weight)


@_add_layer_norm.on("cuda", note="one Triton kernel per direction⁶, else a sum and `layer_norm`")
def _add_layer_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *rest: Any
) -> tuple[Tensor, Tensor]:
    beyond = beyond_kernel(x, residual, weight, rest[2])
    if takes_kernel("add_layer_norm", x, residual, weight, bias, rest[2], beyond=beyond):
        return AddNorm.apply(x, residual, weight, bias, eps, *rest)
    return _layer_norm_reference(x, residual, weight, bias, eps, *rest)


@_add_rms_norm.on("cuda", note="one Triton kernel per direction⁶, else a sum and `rms_norm`")
def _add_rms_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *rest: Any
) -> tuple[Tensor, Tensor]:
    beyond = beyond_kernel(x, residual, weight, rest[2])
    if takes_kernel("add_rms_norm", x, residual, weight, rest[2], beyond=beyond):
        return AddNorm.apply(x, residual, weight, None, eps, *rest)
    return _rms_norm_reference(x, residual, weight, eps, *rest)


def layer_norm_beyond_npu(x: Tensor, weight: Tensor, eps: float) -> str | None:
    """Return the reason why ``npu_add_layer_norm`` does not support the call, or None.

    The operation is CANN's aclnnAddLayerNorm.
    """
    if eps != _NPU_EPSILON:
        return f"npu_add_layer_norm supports only eps {_NPU_EPSILON:g}, but got {eps:g}"
    return rms_norm_beyond_npu(x, weight, "npu_add_layer_norm")


def rms_norm_beyond_npu(x: Tensor, weight: Tensor, kernel: str = "npu_add_rms_norm") -> str | None:
    """Return the reason why ``npu_add_rms_norm`` does not support the call, or None."""
    if not 2 <= x.dim() <= 8 or not x.numel():
        return f"{kernel} supports only non-empty tensors with 2 to 8 dimensions, but got {tuple(x.shape)}"
    if weight.dtype is not x.dtype:
        return f"the weight is {weight.dtype}, but the input is {x.dtype}"
    return unsupported_dtype(kernel, x.dtype)


@_add_layer_norm.on(
    "npu",
    supports=lambda x, residual, weight, bias, eps, *_: layer_norm_beyond_npu(x, weight, eps),
    note="`npu_add_layer_norm`",
    limits="eps 1e-5, weight in the dtype of the input",
)
def _add_layer_norm_npu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, shift, p = arguments
    return _AddLayerNorm.apply(_dropped(x, shift, p), *others)


@_add_rms_norm.on(
    "npu",
    supports=lambda x, residual, weight, *_: rms_norm_beyond_npu(x, weight),
    note="`npu_add_rms_norm`",
    limits="2 to 8 dimensions, weight in the dtype of the input",
)
def _add_rms_norm_npu(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *others, shift, p = arguments
    return _AddRmsNorm.apply(_dropped(x, shift, p), *others)


class _AddLayerNorm(torch.autograd.Function):
    """Compute layer norm of a residual sum with ``npu_add_layer_norm``, saving only the sum for the backward
    pass.

    The kernel's own backward pass requires both summands.

    The sum, and a zero that all layers share, are passed to backward instead. This requires no more memory
    than a separate sum and norm, and the gradient of the sum is added in the same call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        zero_centered: bool,
        keep: Keep | None,
    ) -> tuple[Tensor, Tensor]:
        import torch_npu

        factor = 1 + weight if zero_centered else weight
        output, mean, rstd, total = torch_npu.npu_add_layer_norm(x, residual, factor, bias, eps, True)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.zero_centered, ctx.keep, ctx.parameters = zero_centered, keep, (weight, bias)
        ctx.set_materialize_grads(False)
        return output, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_total: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return of_total, of_total, None, None, None, None, None
        total, mean, rstd, weight = ctx.saved_tensors
        factor = 1 + weight if ctx.zero_centered else weight
        zero = _zero(total.shape, total.dtype, total.device)
        of_total = None if of_total is None else of_total.contiguous()
        dx, _, d_weight, d_bias = torch.ops.npu.npu_add_layer_norm_backward(
            grad.contiguous(), total, zero, rstd, mean, factor, of_total
        )
        return dx, dx, *_handed_on(ctx, d_weight, d_bias), None, None, None


class _AddRmsNorm(torch.autograd.Function):
    """Compute RMS norm of a residual sum with ``npu_add_rms_norm``, and its gradient as for ``npu_rms_norm``.

    torch_npu has no gradient for the fused kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        keep: Keep | None,
    ) -> tuple[Tensor, Tensor]:
        import torch_npu

        factor = 1 + weight if zero_centered else weight
        output, rstd, total = torch_npu.npu_add_rms_norm(x, residual, factor, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.zero_centered, ctx.keep, ctx.parameters = zero_centered, keep, (weight,)
        ctx.set_materialize_grads(False)
        return output, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, of_total: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return of_total, of_total, None, None, None, None
        total, rstd, weight = ctx.saved_tensors
        factor = 1 + weight if ctx.zero_centered else weight
        dx, d_weight = torch.ops.npu.npu_rms_norm_backward(grad.contiguous(), total, factor, rstd)
        dx = dx if of_total is None else dx.add_(of_total)
        return dx, dx, *_handed_on(ctx, d_weight), None, None, None


def _handed_on(ctx: Any, *grads: Tensor) -> list[Tensor | None]:
    """Return the gradients in the dtypes of their parameters, with None for each gradient that ``keep``
    accepts.

    ``keep`` receives the parameters themselves, because those from autograd lack attributes if saved tensors
    are moved.
    """
    return [
        None if ctx.keep is not None and ctx.keep(parameter, grad) else grad.to(parameter.dtype)
        for parameter, grad in zip(ctx.parameters, grads, strict=True)
    ]


@lru_cache_tensors(maxsize=2)  # the layers of a model share it
def _zero(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@_add_layer_norm.example()
def _layer_norm_example(make: Make) -> Tensor:
    output, total = add_layer_norm(make(64, 2, 128), make(64, 2, 128), make(128), make(128), _NPU_EPSILON)
    return output + total


@_add_rms_norm.example()
def _rms_norm_example(make: Make) -> Tensor:
    output, total = add_rms_norm(make(64, 2, 128), make(64, 2, 128), make(128), 1e-6)
    return output + total
