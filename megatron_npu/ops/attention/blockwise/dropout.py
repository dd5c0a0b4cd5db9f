"""Dropout of a tile's weights, reproduced in the backward pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.compiled import Kept
from megatron_npu.ops.dropout import KEEP_LEVELS, keep_of_bits, most_of_kept


def keep_of(p: float) -> int:
    """Return how many of ``KEEP_LEVELS`` weights are kept where each is dropped with probability ``p``.

    Some are dropped where ``p`` is not 0, however small it is, and some are kept.
    """
    return min(max(1, round((1.0 - p) * KEEP_LEVELS)), KEEP_LEVELS - 1 if p else KEEP_LEVELS)


class TileDropout:
    """Drops weights of one tile after the other; which ones, the seed and the order of the tiles decide.

    Attributes:
        gain: what remains is to be multiplied by this; it makes up for the rounding of ``p`` to 2^-16 too.

    Args:
        p: probability that a weight is dropped; nothing is done where it is 0.
        seed: of a generator for this call alone.
    """

    def __init__(self, p: float, seed: int) -> None:
        self._buffers = Buffers()
        self._keep = keep_of(p)
        self.gain = KEEP_LEVELS / self._keep
        # numpy's draws 64 bits in half the time of torch's, and the same ones in every version
        self._generator = np.random.SFC64(seed) if p else None
        self._kept: Tensor | None = None

    def draw(self, count: int) -> Kept | None:
        """Return which of so many weights are kept, for a kernel that drops the others; None: all."""
        bits = self._bits(count)
        return None if bits is None else Kept(bits, most_of_kept(self._keep))

    def drop(self, weights: Tensor, out: Tensor) -> Tensor:
        """Write ``weights``, some of them zeroed, to ``out`` and return it; without dropout ``weights``."""
        bits = self._bits(weights.numel())
        if bits is None:
            return weights
        kept = self._buffers.take("kept", weights.shape, weights.dtype)
        self._kept = keep_of_bits(bits, weights.shape, self._keep, kept)
        return torch.mul(weights, self._kept, out=out)

    def _bits(self, count: int) -> Tensor | None:
        if self._generator is None:
            return None
        return torch.from_numpy(self._generator.random_raw(-(-count // 4)).view(np.int64))

    def drop_again(self, tensor: Tensor) -> None:
        """Zero in place what the last ``drop`` zeroed."""
        if self._kept is not None:
            tensor.mul_(self._kept)
