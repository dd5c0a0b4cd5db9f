"""Define the limits on the arguments of the linear layer."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of
from megatron_npu.sim.kernels.limits.common import HALVES

LINEAR = Limits(
    "wheel, npu_linear",
    (
        dtype("input", torch.float32, *HALVES),
        dimensions("input", 2),
        dtype_of("weight", "input"),
        dimensions("weight", 2),
        Limit("weight", "[n, k] for input [m, k]", lambda a: a.weight.size(1) == a.input.size(1)),
    ),
    "The wheel lists float32, float16, int32 and int8; integers are not simulated.",
)

LIMITS = {
    "npu_linear": LINEAR,
}
