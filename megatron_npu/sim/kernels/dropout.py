"""Define reference kernels for dropout whose mask is packed into bits, as on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_npu.sim.kernels import randomness
from megatron_npu.sim.kernels.registry import kernel

_PADDING = 128  # the device rounds the number of bits up to this
_WEIGHTS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


@kernel("_npu_dropout")
def npu_dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return the output and the mask, which has one bit per element and is padded to a multiple of 128 bits.

    A bit is 1 if the element is kept. The lowest bit is the first.
    """
    keep = randomness.kept(*randomness.advance(), input.numel(), 1 - p)
    return _apply(input, keep, p), pack_bits(keep)


@kernel("_npu_dropout_gen_mask.Tensor")
def npu_dropout_gen_mask(
    input: Tensor,
    size: Sequence[int],
    p: float,
    seed: int,
    offset: int,
    *,
    parallel: bool | None = True,
    sync: bool | None = None,
) -> Tensor:
    """Return the packed mask that an operation generates for ``count`` elements from the given seed and
    offset.
    """
    return pack_bits(randomness.kept(seed, offset, torch.Size(size).numel(), 1 - p))


@kernel("npu_dropout_backward")
def npu_dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return the gradient, computed with the packed mask of the forward pass."""
    return _apply(grad_output, unpack_bits(mask, grad_output.numel()), p)


def _apply(x: Tensor, keep: Tensor, p: float) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    return (x.float() * keep.view(x.shape) * scale).to(x.dtype)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans ``[n]`` into bytes, eight per byte, after padding n to a multiple of 128."""
    padded = torch.zeros(-(-bits.numel() // _PADDING) * _PADDING, dtype=torch.uint8)
    padded[: bits.numel()] = bits
    return (padded.view(-1, 8) * _WEIGHTS).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpack the result of ``pack_bits``, and return the first ``count`` booleans."""
    return ((packed.unsqueeze(-1) & _WEIGHTS) != 0).flatten()[:count]
