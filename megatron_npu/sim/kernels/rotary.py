"""Define reference kernels for rotary position embedding, ``cos · x + sin · rotate(x)``."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_rotary_mul")
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Rotate ``input`` (4 dimensions, the last of size d) by the cosines ``r1`` and the sines ``r2``.

    As on the device, cos and sin are cast to the dtype of ``input`` before the multiplication.
    """
    x, cos, sin = input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    turned = _rotate(x, rotary_mode) if rotate is None else x @ rotate.float()
    return (cos * x + sin * turned).to(input.dtype)


@kernel("npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``input``, of the cosines and of the sines, all in the dtype of ``input``."""
    g, x, cos, sin = grad.float(), input.float(), r1.to(input.dtype).float(), r2.to(input.dtype).float()
    dx = cos * g - _rotate(sin * g, rotary_mode)  # the transpose of a rotation turns backwards
    dcos = (g * x).sum_to_size(r1.shape)
    dsin = (g * _rotate(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dcos.to(input.dtype), dsin.to(input.dtype)


@kernel("npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """Rotate ``query`` and ``key`` in place, and return them.

    The schema does not declare this mutation.
    """
    for tensor in (query, key):
        tensor.copy_(npu_rotary_mul(tensor, cos, sin, rotary_mode))
    return query, key


def _rotate(x: Tensor, mode: str) -> Tensor:
    """Rotate the pairs (i, i + d/2) ("half") or (2i, 2i + 1) ("interleave") by 90 degrees."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
