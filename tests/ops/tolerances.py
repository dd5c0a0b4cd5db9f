"""How far an operation may be from its fp64 formula, by dtype: relative to the largest value expected."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result") -> None:
    """Compare with fp64 ``expected``, relative to its peak: gradients of sums grow with their length."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    limit = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    error = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g}"
