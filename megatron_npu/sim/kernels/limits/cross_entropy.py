"""Define the limits on the arguments of cross-entropy."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, one_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS, HALVES

CROSS_ENTROPY_ROWS = 200000
_STATISTICS = ("logits_max", "sum_exp_logits", "predicted_logits")

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
        Limit("label_smoothing", "at least 0.0 and below 1.0", lambda a: 0.0 <= a.label_smoothing < 1.0),
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

_FACTORS = (
    dtype("input", *HALVES),
    dimensions("input", 2),
    dtype_of("weight", "input"),
    dimensions("weight", 2),
    Limit("weight", "[v, h] for input [n, h]", lambda a: a.weight.size(1) == a.input.size(1)),
)

FUSED_LINEAR_ONLINE_MAX_SUM = Limits(
    "wheel, npu_fused_linear_online_max_sum; aclnnFusedLinearOnlineMaxSum",
    (
        *_FACTORS,
        Limit("input", "h up to 65534 for input [n, h]", lambda a: a.input.size(1) <= 65534),
        Limit("weight", "v above 0 for weight [v, h]", lambda a: a.weight.size(0) > 0),
        dtype("target", torch.int32, torch.int64),
        dimensions("target", 1),
        Limit("target", "[n] for input [n, h]", lambda a: a.target.size(0) == a.input.size(0)),
        Limit("vocab_start_index", "at least 0", lambda a: a.vocab_start_index >= 0),
        Limit(
            "vocab_end_index",
            "at least vocab_start_index",
            lambda a: a.vocab_end_index >= a.vocab_start_index,
        ),
        Limit(
            "target",
            "below v, counted from vocab_start_index, or not between the indices",
            lambda a: bool(
                (
                    (a.target < a.vocab_start_index)
                    | (a.target > a.vocab_end_index)
                    | (a.target - a.vocab_start_index < a.weight.size(0))
                ).all()
            ),
        ),
    ),
    "aclnn also requires both indices to be below the largest target, which its own examples violate. It "
    "counts vocab_end_index as part of the vocabulary shard, but public tests of the kernel do not; the "
    "simulator does.",
)

FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM = Limits(
    "wheel, npu_fused_cross_entropy_loss_with_max_sum",
    (
        *(dtype(each, torch.float32) for each in _STATISTICS),
        dimensions("logits_max", 1),
        *(shape_of(each, "logits_max") for each in _STATISTICS[1:]),
        one_of("label_smoothing", 0.0, None),
        one_of("input", None),
        one_of("weight", None),
    ),
)

FUSED_LINEAR_CROSS_ENTROPY_BACKWARD = Limits(
    "wheel, npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
    (
        *_FACTORS,
        Limit("weight", "at least 128 for v in [v, h]", lambda a: a.weight.size(0) >= 128),
        dtype("grad", torch.float32),
        dimensions("grad", 1),
        Limit("grad", "[n] for input [n, h]", lambda a: a.grad.size(0) == a.input.size(0)),
        dtype("target_mask", torch.uint8),
        Limit(
            "target_mask",
            "[(n + 7) // 8], one bit per row",
            lambda a: a.target_mask.shape == ((a.input.size(0) + 7) // 8,),
        ),
        dtype("masked_target", torch.int32, torch.int64),
        shape_of("masked_target", "grad"),
        one_of("label_smoothing", 0.0),
        Limit(
            "softmax",
            "a value, or both logits_max and sum_exp_logits",
            lambda a: a.softmax is not None or None not in (a.logits_max, a.sum_exp_logits),
            even_none=True,
        ),
        *(dtype(each, torch.float32) for each in ("logits_max", "sum_exp_logits", "softmax")),
    ),
    "The simulator does not count the kernel's own memory for fp32 sums, which include [v, h].",
)

LIMITS = {
    "npu_cross_entropy_loss": CROSS_ENTROPY_LOSS,
    "npu_cross_entropy_loss_backward": CROSS_ENTROPY_LOSS_BACKWARD,
    "npu_fused_linear_online_max_sum": FUSED_LINEAR_ONLINE_MAX_SUM,
    "npu_fused_cross_entropy_loss_with_max_sum": FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward": FUSED_LINEAR_CROSS_ENTROPY_BACKWARD,
}
