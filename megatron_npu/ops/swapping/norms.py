"""Replace layer norm and RMS norm modules with our operations.

torch's modules are recognized by class, and others by their results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_npu.ops.norm import layer_norm, rms_norm
from megatron_npu.ops.swapping.found import (
    Found,
    Left,
    Replacement,
    agrees,
    bound_elsewhere,
    has_forward_of,
    is_leaf,
    own_forward,
)

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def recognise(module: nn.Module) -> Found:
    """Return our replacement for a module that computes a norm."""
    if has_forward_of(module, nn.LayerNorm):
        return _torch_norm(module, Replacement("norm", "layer_norm", _layer_norm))
    if has_forward_of(module, nn.RMSNorm):
        return _torch_norm(module, Replacement("norm", "rms_norm", _torch_rms_norm))
    if "norm" not in type(module).__name__.lower() or not is_leaf(module):
        return None
    return _by_behaviour(module)


def _torch_norm(module: nn.Module, replacement: Replacement) -> Found:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None or (isinstance(module, nn.LayerNorm) and bias is None):
        return Left("norm", "it has no weight, or no bias")
    if weight.dim() != 1:
        return Left(
            "norm",
            f"the norm covers {weight.dim()} dimensions, but the operation only the last dimension",
        )
    return replacement


def _by_behaviour(module: nn.Module) -> Found:
    """Recognize an RMS norm by its output for a small test input, after setting its weight to known
    values.
    """
    parameters, eps = dict(module.named_parameters()), _eps(module)
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or eps is None:
        return Left("norm", f"{type(module).__name__} does not consist of one weight vector and an epsilon")
    draw = functools.partial(
        torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    x = draw(3, parameters["weight"].numel()) * 0.01  # so small that eps matters
    weight = draw(parameters["weight"].numel())
    try:
        with torch.no_grad():
            actual = functional_call(module, {"weight": weight}, (x,))
    except Exception as error:  # whatever a user's module does with an input that it does not expect
        return Left(
            "norm", f"{type(module).__name__} cannot be called with [n, h] alone ({type(error).__name__})"
        )
    for zero_centered, forward in ((False, _rms_norm), (True, _rms_norm_plus_one)):
        factor = 1 + weight if zero_centered else weight
        if agrees(actual, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor, 1e-5):
            return Replacement("norm", "rms_norm", forward)
    return Left("norm", f"{type(module).__name__} computes something other than RMS norm")


def _eps(module: nn.Module) -> float | None:
    values = [getattr(module, name, None) for name in _EPS_NAMES]
    return next((value for value in values if isinstance(value, float)), None)


def _layer_norm(module: Any, input: Tensor) -> Tensor:
    if _not_here(module, input):
        return own_forward(module, input)
    return layer_norm(input, module.weight, module.bias, module.eps)


def _torch_rms_norm(module: Any, input: Tensor) -> Tensor:
    if _not_here(module, input):
        return own_forward(module, input)
    eps = torch.finfo(input.dtype).eps if module.eps is None else module.eps
    return rms_norm(input, module.weight, eps)


def _rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    if _not_here(module, hidden_states):
        return own_forward(module, hidden_states)
    return rms_norm(hidden_states, module.weight, _eps(module) or 0.0)


def _rms_norm_plus_one(module: Any, hidden_states: Tensor) -> Tensor:
    if _not_here(module, hidden_states):
        return own_forward(module, hidden_states)
    return rms_norm(hidden_states, module.weight, _eps(module) or 0.0, zero_centered_gamma=True)


def _not_here(module: Any, input: Tensor) -> bool:
    """Return True if a module must use its original forward method.

    With two dtypes, its output may have either dtype.
    """
    return bound_elsewhere(input) or module.weight.dtype is not input.dtype
