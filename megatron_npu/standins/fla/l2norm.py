"""Stub for ``fla.modules.l2norm``, which scales vectors to length one."""

from __future__ import annotations

from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x / sqrt(sum x² + eps)`` for vectors ``[..., n]``, computed in fp32."""
    values = x.float()
    return (values * values.square().sum(-1, keepdim=True).add(eps).rsqrt()).to(x.dtype)
