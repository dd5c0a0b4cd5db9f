"""The limits of reshaping and transposing at once."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dtype

CONFUSION_TRANSPOSE_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)

CONFUSION_TRANSPOSE = Limits(
    "wheel, npu_confusion_transpose",
    (
        dtype("input", *CONFUSION_TRANSPOSE_DTYPES),
        Limit(
            "perm",
            "a permutation of the dimensions that are transposed",
            lambda a: sorted(a.perm) == list(range(a.input.dim() if a.transpose_first else len(a.shape))),
        ),
        Limit(
            "shape",
            "as many elements as input",
            lambda a: torch.Size(a.shape).numel() == a.input.numel(),
        ),
    ),
    "bfloat16 is not in the wheel's list, which is older than the dtype on this device; it is allowed.",
)

LIMITS = {
    "npu_confusion_transpose": CONFUSION_TRANSPOSE,
}
