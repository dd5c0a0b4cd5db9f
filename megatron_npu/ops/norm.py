"""Layer norm and RMS norm over the last dimension, statistics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.dispatch import Operation


def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool = False
) -> Tensor:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016), biased variance.

    Args:
        input: ``[..., h]``, fp32, bf16 or fp16.
        weight: ``[h]``.
        bias: ``[h]``.
        eps: added to the variance.
        zero_centered_gamma: the factor is ``1 + weight`` (Megatron's ``--apply-layernorm-1p``).

    Returns:
        ``[..., h]`` in the dtype of ``input``; mean and variance are computed in fp32.
    """
    return _layer_norm(input, 1 + weight if zero_centered_gamma else weight, bias, eps)


def rms_norm(input: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` (Zhang and Sennrich 2019); as ``layer_norm`` otherwise."""
    return _rms_norm(input, 1 + weight if zero_centered_gamma else weight, eps)


def _layer_norm_reference(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    centered = x - x.mean(-1, keepdim=True)
    normal = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (normal * weight + bias).to(input.dtype)


def _rms_norm_reference(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(input.dtype)


_layer_norm = Operation("layer_norm", _layer_norm_reference)
_rms_norm = Operation("rms_norm", _rms_norm_reference)


@_layer_norm.on("cpu", "cuda", "npu")
def _layer_norm_native(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(input, weight.shape, weight, bias, eps)


@_rms_norm.on("cpu", "cuda")
def _rms_norm_native(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)
