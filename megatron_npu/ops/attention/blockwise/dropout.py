"""Apply dropout to a tile's attention weights, with masks that the backward pass can reproduce."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.compiled import Kept
from megatron_npu.ops.dropout import KEEP_LEVELS, keep_of_bits, most_of_kept


def keep_of(p: float) -> int:
    """Convert the drop probability ``p`` to the number of kept attention weights out of ``KEEP_LEVELS``.

    At least one weight is dropped if ``p`` is not 0, and at least one is kept.
    """
    return min(max(1, round((1.0 - p) * KEEP_LEVELS)), KEEP_LEVELS - 1 if p else KEEP_LEVELS)


class TileDropout:
    """Dropout of attention weights, tile by tile.

    The seed and the order of the tiles determine which weights are dropped.

    Attributes:
        gain: the factor for the kept weights, which also corrects for rounding ``p`` to 2^-16.

    Args:
        p: the probability of dropping a weight; 0 means no dropout.
        seed: the seed of a generator that only this call uses.
    """

    def __init__(self, p: float, seed: int) -> None:
        self._buffers = Buffers()
        self._keep = keep_of(p)
        self.gain = KEEP_LEVELS / self._keep
        # numpy's draws 64 bits in half the time of torch's, and the same ones in every version
        self._generator = np.random.SFC64(seed) if p else None
        self._kept: Tensor | None = None

    def draw(self, count: int) -> Kept | None:
        """Return the mask of kept weights for kernels that apply dropout themselves, or None if all
        weights are kept.
        """
        bits = self._bits(count)
        return None if bits is None else Kept(bits, most_of_kept(self._keep))

    def drop(self, weights: Tensor, out: Tensor) -> Tensor:
        """Write ``weights`` to ``out`` with dropout applied, and return ``out``.

        Without dropout, return the input.
        """
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
        """Set to zero, in place, the elements of ``tensor`` that the last call of ``drop`` set to zero."""
        if self._kept is not None:
            tensor.mul_(self._kept)
