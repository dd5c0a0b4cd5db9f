"""Define conditions that several tables of limits share."""

from __future__ import annotations

from itertools import pairwise

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)


def not_decreasing(values: list[int]) -> bool:
    """Return True if cumulative ends never decrease and are never negative."""
    return all(first <= second for first, second in pairwise([0, *values]))
