"""Convert attention tensors between the layout of a call and ``[b, n, s, d]``.

Results are views unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Where the dimensions of [b, n, s, d] lie in each four-dimensional layout.
_TO_BNSD = {"SBND": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
_FROM_BNSD = {"SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
# Layouts whose last dimension is heads × head size, and the same memory with the heads apart.
HEADLESS = {"SBH": "SBND", "BSH": "BSND"}
LAYOUTS = ("SBH", "BSH", "SBND", "BSND", "BNSD", "TND")


def bnsd_shape(shape: Sequence[int], layout: str, heads: int) -> tuple[int, int, int, int]:
    """Return the shape of the result of ``to_bnsd`` for a tensor of shape ``shape``."""
    if layout == "TND":
        return 1, shape[1], shape[0], shape[2]
    if layout in HEADLESS:
        batch, length = (shape[1], shape[0]) if layout == "SBH" else (shape[0], shape[1])
        return batch, heads, length, shape[2] // heads
    b, n, s, d = (shape[i] for i in _TO_BNSD[layout])
    return b, n, s, d


def to_bnsd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """Return ``tensor`` with its dimensions in the order ``[b, n, s, d]``.

    TND is treated as a batch of one.
    """
    if layout == "TND":
        return tensor.transpose(0, 1).unsqueeze(0)
    if layout in HEADLESS:
        tensor, layout = tensor.unflatten(-1, (heads, -1)), HEADLESS[layout]
    return tensor.permute(_TO_BNSD[layout])


def from_bnsd(tensor: Tensor, layout: str) -> Tensor:
    """Convert a tensor from ``[b, n, s, d]`` to the layout of the call, copying it for SBH and BSH if
    necessary.
    """
    if layout == "TND":
        return tensor.squeeze(0).transpose(0, 1)
    if layout in HEADLESS:
        return tensor.permute(_FROM_BNSD[HEADLESS[layout]]).flatten(-2)
    return tensor.permute(_FROM_BNSD[layout])


def to_tokens(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """Reshape a tensor to ``[b · s, n, d]``, one batch element after another.

    The tensor is copied unless the layout is BSH, BSND or TND.
    """
    if layout == "TND":
        return tensor
    return to_bnsd(tensor, layout, heads).transpose(1, 2).flatten(0, 1)


def from_tokens(tensor: Tensor, layout: str, batch: int) -> Tensor:
    """Undo ``to_tokens``."""
    if layout == "TND":
        return tensor
    return from_bnsd(tensor.unflatten(0, (batch, -1)).transpose(1, 2), layout)
