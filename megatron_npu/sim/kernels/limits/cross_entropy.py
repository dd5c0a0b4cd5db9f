"""The limits of the cross-entropy."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, one_of
from megatron_npu.sim.kernels.limits.common import FLOATS

CROSS_ENTROPY_ROWS = 200000

CROSS_ENTROPY_ARGUMENTS = (
    dtype("target", torch.int64),
    dimensions("target", 1),
    dtype("weight", torch.float32),
    one_of("reduction", "mean", "sum", "none"),
    Limit("lse_square_scale_for_zloss", "0.0", lambda a: a.lse_square_scale_for_zloss == 0.0),
)

CROSS_ENTROPY_LOSS = Limits(
    "wheel, npu_cross_entropy_loss",
    (
        dtype("input", *FLOATS),
        dimensions("input", 2),
        Limit(
            "input",
            f"[n, c] with n from 1 to {CROSS_ENTROPY_ROWS} and c above 0",
            lambda a: 0 < a.input.size(0) <= CROSS_ENTROPY_ROWS and a.input.size(1) > 0,
        ),
        *CROSS_ENTROPY_ARGUMENTS,
        Limit("target", "[n] for input [n, c]", lambda a: a.target.size(0) == a.input.size(0)),
        Limit(
            "target",
            "classes from 0 to c - 1",
            lambda a: bool(((a.target >= 0) & (a.target < a.input.size(1))).all()),
        ),
        Limit("weight", "[c] for input [n, c]", lambda a: a.weight.shape == a.input.shape[1:]),
        Limit(
            "weight", "values above 0 and up to 1", lambda a: bool(((a.weight > 0) & (a.weight <= 1)).all())
        ),
        Limit("ignore_index", "below c for input [n, c]", lambda a: a.ignore_index < a.input.size(1)),
        Limit("label_smoothing", "0.0 up to below 1.0", lambda a: 0.0 <= a.label_smoothing < 1.0),
        one_of("return_zloss", False),
    ),
    "A negative ignore_index ignores nothing; torch's -100 targets are outside the allowed classes.",
)

CROSS_ENTROPY_LOSS_BACKWARD = Limits(
    "wheel, npu_cross_entropy_loss, constraints on input.requires_grad",
    (
        *CROSS_ENTROPY_ARGUMENTS,
        Limit("label_smoothing", "0.0 where a gradient is needed", lambda a: a.label_smoothing == 0.0),
        Limit(
            "weight",
            "None where a gradient of the mean is needed",
            lambda a: a.reduction != "mean",
        ),
        Limit(
            "ignore_index",
            "-100 where a gradient of the mean is needed",
            lambda a: a.reduction != "mean" or a.ignore_index == -100,
        ),
    ),
)

LIMITS = {
    "npu_cross_entropy_loss": CROSS_ENTROPY_LOSS,
    "npu_cross_entropy_loss_backward": CROSS_ENTROPY_LOSS_BACKWARD,
}
