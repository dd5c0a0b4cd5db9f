"""Draw random numbers that a backward kernel can regenerate from the generator's seed and offset."""

from __future__ import annotations

import torch
from torch import Tensor

# What torch_npu advances the offset by for one mask: it asks for 10 and the generator rounds up to 4.
_OFFSET_PER_MASK = 12
# Odd multipliers that spread neighbouring (seed, offset) pairs over the host generator's seeds.
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_MASK_63_BITS = (1 << 63) - 1


def advance() -> tuple[int, int]:
    """Return the seed and offset of the current device's default generator, and advance the offset."""
    npu = torch.npu  # type: ignore[attr-defined]  # torch_npu is imported when a kernel runs
    generator = npu.default_generators[npu.current_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _OFFSET_PER_MASK)
    return seed, offset


def kept(seed: int, offset: int, count: int, keep_prob: float) -> Tensor:
    """Return ``count`` booleans, each True with probability ``keep_prob``, which depend only on seed and
    offset.
    """
    return _uniform(seed, offset, count) < keep_prob


def _uniform(seed: int, offset: int, count: int) -> Tensor:
    """Return ``count`` fp32 random numbers in [0, 1)."""
    mixed = (seed * _MIX[0] + (offset + 1) * _MIX[1]) & _MASK_63_BITS
    return torch.rand(count, generator=torch.Generator().manual_seed(mixed), dtype=torch.float32)
