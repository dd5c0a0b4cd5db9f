"""Define the limits on the arguments of Megatron's fused softmax."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS

SOFTMAX_SIDE = (32, 4096)  # of the last two dimensions of npu_scaled_masked_softmax, in steps of 32


def _broadcastable(shape: torch.Size, target: torch.Size) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(a in (1, b) for a, b in zip(padded, target, strict=True))


def _softmax_sides(argument: str) -> Limit:
    least, most = SOFTMAX_SIDE
    return Limit(
        argument,
        f"last two dimensions from {least} to {most} and divisible by {least}",
        lambda a: all(
            least <= side <= most and side % least == 0 for side in getattr(a, argument).shape[-2:]
        ),
    )


def _softmax(argument: str) -> tuple[Limit, ...]:
    return (
        dtype(argument, *FLOATS),
        dimensions(argument, 4),
        _softmax_sides(argument),
        dtype("mask", torch.bool),
        Limit(
            "mask",
            f"a shape that broadcasts to that of {argument}",
            lambda a: _broadcastable(a.mask.shape, getattr(a, argument).shape),
        ),
    )


SCALED_MASKED_SOFTMAX = Limits("wheel, npu_scaled_masked_softmax", _softmax("x"))

SCALED_MASKED_SOFTMAX_BACKWARD = Limits(
    SCALED_MASKED_SOFTMAX.source, (*_softmax("y"), shape_of("y_grad", "y"), dtype_of("y_grad", "y"))
)

LIMITS = {
    "npu_scaled_masked_softmax": SCALED_MASKED_SOFTMAX,
    "npu_scaled_masked_softmax_backward": SCALED_MASKED_SOFTMAX_BACKWARD,
}
