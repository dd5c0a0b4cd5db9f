"""Patch the fused elementwise functions in ``megatron.core.fusions``.

The functions are bias_gelu, bias_geglu, bias_swiglu and bias_dropout. Also patches ``megatron.core.jit``,
whose ``jit_fuser`` compiles them upstream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, around, constant, replace
from megatron_npu.adaptors.shared.decorators import upstream_compiles
from megatron_npu.ops import activation, dropout

Function = TypeVar("Function", bound=Callable[..., Any])

_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"
_WHY_SWIGLU = "upstream makes a chain of element-wise passes; on cuda upstream compiles the function"

constant(
    "megatron.core.fusions.fused_bias_gelu:bias_gelu_impl",
    activation.bias_gelu,
    condition=upstream_compiles,
    why=(
        "upstream makes eight element-wise passes and sums the bias gradient in 16 bits; on cuda upstream"
        " compiles the function"
    ),
)


@replace(
    "megatron.core.fusions.fused_bias_geglu:bias_geglu_impl",
    condition=upstream_compiles,
    why=(
        "upstream makes a chain of passes and sums the bias gradient in 16 bits; on cuda upstream "
        "compiles the function"
    ),
)
def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Compute GEGLU: map ``[s, b, 2h]`` (or ``[t, 2h]``) and the bias ``[2h]`` to ``[s, b, h]`` (or ``[t,
    h]``).
    """
    return activation.geglu(input, bias)


@around(f"{_SWIGLU}:bias_swiglu_impl", condition=upstream_compiles, why=_WHY_SWIGLU)
def bias_swiglu_impl(
    original: Callable[..., Tensor], input: Tensor, bias: Tensor | None, *options: Any, **named: Any
) -> Tensor:
    """Compute SwiGLU: map ``[s, b, 2h]`` (or ``[t, 2h]``) and the bias ``[2h]`` to ``[s, b, h]`` (or ``[t,
    h]``).

    Upstream handles the calls that store the input in fp8, or move it to the host, for the backward pass.
    """
    if any(options) or any(named.values()):  # fp8_input_store, cpu_offload_input
        return original(input, bias, *options, **named)
    return activation.swiglu(input, bias)


@replace(f"{_SWIGLU}:swiglu", devices=WITHOUT_CUDA, why=_WHY_SWIGLU)
def swiglu(y: Tensor) -> Tensor:
    """Compute SwiGLU: map ``[t, 2h]`` to ``[t, h]``.

    The weighted variant for MoE calls this function.
    """
    return activation.swiglu(y)


@replace(f"{_SWIGLU}:swiglu_back", devices=WITHOUT_CUDA, why=_WHY_SWIGLU)
def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of ``swiglu`` with respect to its input ``y``.

    The weighted variant for MoE calls this function.
    """
    return activation.swiglu_backward(g, y)


_bias_dropout_add = partial(
    replace,
    "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
    devices=WITHOUT_CUDA,
    why=(
        "upstream makes three passes and draws one random number per value; on cuda upstream compiles the"
        " function"
    ),
)


@_bias_dropout_add(versions="<0.17")
def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """Return ``residual + dropout(x + bias)`` for ``[s, b, h]`` tensors and a bias ``[h]``."""
    x, bias = x_with_bias
    return dropout.bias_dropout_add(x, bias, residual, prob, training)


@_bias_dropout_add(versions=">=0.17")
def bias_dropout_add_in_residual_dtype(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """Compute ``bias_dropout_add`` in the residual's dtype, which may be fp32 since 0.17."""
    x, bias = x_with_bias
    bias = None if bias is None else bias.to(residual.dtype)
    return dropout.bias_dropout_add(x.to(residual.dtype), bias, residual, prob, training)


@replace(
    "megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train",
    devices=("cuda",),
    condition=upstream_compiles,
    why=(
        "upstream compiles the function and keeps a mask of one byte per value; our kernel draws the "
        "random numbers again"
    ),
)
def bias_dropout_add_in_training(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
) -> Tensor:
    """Compute what this version's ``_bias_dropout_add_func`` computes in training."""
    from megatron.core.fusions import fused_bias_dropout

    x, bias = x_with_bias
    if x.dtype is not residual.dtype:  # which wins depends on the version
        return fused_bias_dropout._bias_dropout_add_func(x_with_bias, residual, prob, True)
    return dropout.bias_dropout_add(x, bias, residual, prob, True)


@replace(
    "megatron.core.jit:jit_fuser",
    devices=WITHOUT_CUDA,
    early=True,
    why="torch.compile needs a C++ compiler on cpu and fails in torch_npu's inductor; "
    "the functions it would fuse are replaced by fused operations instead",
    until="torch_npu's inductor compiles megatron-core's fusions",
)
def jit_fuser(function: Function) -> Function:
    """Return the function without compiling it."""
    return function
