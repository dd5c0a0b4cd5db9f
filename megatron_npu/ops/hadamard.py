"""Compute the Walsh-Hadamard transform, which spreads outlier channels over all channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops.caching import lru_cache_tensors


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """Multiply ``x`` by ``scale`` and by Sylvester's Hadamard matrix ``H``: ``H_1 = [1]``, ``H_2n = [[H_n,
    H_n], [H_n, -H_n]]``.

    This is one matmul on every device: rows are the channels of a head, typically 128.

    Args:
        x: ``[..., n]``; if n is not a power of two, rows are padded with zeros to the next one, and the
            result is truncated again.
        scale: factor applied to the result; ``n ** -0.5`` preserves norms.

    Returns:
        A tensor with the shape and dtype of ``x``; computed in fp32.
    """
    size = x.size(-1)
    matrix = _matrix((size - 1).bit_length(), x.device)
    padded = F.pad(x.float(), (0, matrix.size(0) - size))
    return (padded @ matrix * scale)[..., :size].to(x.dtype)


@lru_cache_tensors(maxsize=8)
def _matrix(doublings: int, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix in fp32, with ``2 ** doublings`` rows."""
    result = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    for _ in range(doublings):
        result = torch.cat([torch.cat([result, result], 1), torch.cat([result, -result], 1)], 0)
    return result.to(device)
