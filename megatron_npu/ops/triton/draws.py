"""Store the random state of a dropout call, so that the backward pass can reproduce its mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEVELS = 1 << 31  # as many bits decide about one value


class Dropped(NamedTuple):
    """Description of the values that dropout keeps in a tensor, with the factor by which it scales them.

    Attributes:
        seed: int64 ``[1]`` on the device.
        level: a value is kept if its 31 random bits are below this number.
        scale: the inverse of the probability that a value is kept.
    """

    seed: Tensor
    level: int
    scale: float


def drawn(p: float, device: torch.device) -> Dropped | None:
    """Return the state of a new dropout call with probability ``p``, or None if ``p`` is 0.

    The seed comes from the device's torch generator, on the device. Therefore, Megatron's RNG tracker
    controls it, a recomputation that has restored the generator's state draws the same values, a CUDA graph
    draws again at every replay, and the host never waits.
    """
    if p == 0.0:
        return None
    return Dropped(torch.randint(1 << 62, (1,), dtype=torch.int64, device=device), *level_and_scale(p))


def level_and_scale(p: float) -> tuple[int, float]:
    """Return the threshold of random draws and the scale of kept values for a dropout probability."""
    level = min(_LEVELS - 1, round((1.0 - p) * _LEVELS))
    return level, _LEVELS / level if level else 0.0
