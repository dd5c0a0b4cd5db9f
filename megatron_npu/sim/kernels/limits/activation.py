"""The limits of SwiGLU, GELU and SiLU."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, one_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS

SWIGLU_INPUT = (
    dtype("input", *FLOATS),
    dimensions("input", 1, 8),
    Limit("dim", "a dimension of input", lambda a: -a.input.dim() <= a.dim < a.input.dim()),
    Limit("dim", "a dimension of even size", lambda a: a.input.size(a.dim) % 2 == 0),
)


def _elementwise(source: str, *dtypes: torch.dtype) -> Limits:
    return Limits(source, (dtype("input", *dtypes), dimensions("input", 0, 8)))


def _elementwise_backward(table: Limits, grad: str) -> Limits:
    return Limits(table.source, (*table.limits, shape_of(grad, "input"), dtype_of(grad, "input")))


FAST_GELU = _elementwise("wheel, npu_fast_gelu", *FLOATS)
GELU = Limits("aclnnGelu, aclnnGeluV2", (*FAST_GELU.limits, one_of("approximate", "none", "tanh")))
SILU = _elementwise("wheel, npu_silu; aclnnSilu", *FLOATS)

LIMITS = {
    "npu_swiglu": Limits("wheel, npu_swiglu", SWIGLU_INPUT),
    "npu_swiglu_backward": Limits("wheel, npu_swiglu", (*SWIGLU_INPUT, dtype_of("grad_output", "input"))),
    "npu_fast_gelu": FAST_GELU,
    "fast_gelu": FAST_GELU,
    "npu_fast_gelu_backward": _elementwise_backward(FAST_GELU, "grad"),
    "npu_gelu": GELU,
    "npu_gelu_backward": _elementwise_backward(GELU, "grad_output"),
    "npu_silu": SILU,
}
