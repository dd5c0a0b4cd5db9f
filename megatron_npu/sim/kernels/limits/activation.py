"""Define the limits on the arguments of SwiGLU and GELU."""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, one_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS

SWIGLU_INPUT = (
    dtype("input", *FLOATS),
    dimensions("input", 1, 8),
    Limit("dim", "a dimension of input", lambda a: -a.input.dim() <= a.dim < a.input.dim()),
    Limit("dim", "a dimension of even size", lambda a: a.input.size(a.dim) % 2 == 0),
)

GELU_INPUT = (dtype("input", *FLOATS), dimensions("input", 0, 8), one_of("approximate", "none", "tanh"))

LIMITS = {
    "npu_swiglu": Limits("wheel, npu_swiglu", SWIGLU_INPUT),
    "npu_swiglu_backward": Limits("wheel, npu_swiglu", (*SWIGLU_INPUT, dtype_of("grad_output", "input"))),
    "npu_gelu": Limits("aclnnGelu, aclnnGeluV2", GELU_INPUT),
    "npu_gelu_backward": Limits(
        "aclnnGelu, aclnnGeluV2",
        (*GELU_INPUT, shape_of("grad_output", "input"), dtype_of("grad_output", "input")),
    ),
}
