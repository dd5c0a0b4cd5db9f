"""Tolerances of an operation's difference from its fp64 formula, by dtype, relative to the largest value."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_near(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "result", loose: float = 1.0
) -> None:
    """Compare with ``expected`` in fp64, relative to its peak, because gradients of sums grow with length.

    ``loose`` multiplies the tolerance, for operations that lose precision by design.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    if not expected.numel():
        return
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu()  # an NPU has no fp64
    limit = loose * TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    error = (actual - expected).abs().max().item()
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g}"
