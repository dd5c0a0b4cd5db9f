"""Define the limits on the arguments of RMSNorm, and of RMSNorm and layer norm after a residual addition."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS


def _gamma_ends_input(argument: str, of: str = "input") -> Limit:
    return Limit(
        argument,
        f"the last dimensions of {of}, fewer than all",
        lambda a: (
            0 < a.gamma.dim() < getattr(a, of).dim()
            and getattr(a, of).shape[-a.gamma.dim() :] == a.gamma.shape
        ),
    )


RMS_NORM = Limits(
    "wheel, npu_rms_norm; aclnnRmsNorm",
    (
        dtype("input", *FLOATS),
        dimensions("input", 2, 8),
        dtype_of("gamma", "input"),
        _gamma_ends_input("gamma"),
    ),
    "The wheel says that gamma has 2 to 8 dimensions and shows one; aclnnRmsNorm says 1 to 8. op-plugin's "
    "tests for Atlas A2 also combine a float32 gamma with float16; the simulator follows the wheel, which "
    "requires equal dtypes.",
)

RMS_NORM_BACKWARD = Limits(
    "wheel, npu_rms_norm; aclnnRmsNormGrad",
    (
        *RMS_NORM.limits,
        shape_of("dy", "input"),
        dtype_of("dy", "input"),
        dtype("rstd", torch.float32),
    ),
)

ADD_RMS_NORM = Limits(
    "wheel, npu_add_rms_norm_cast and npu_rms_norm; aclnnAddRmsNorm",
    (
        dtype("x1", *FLOATS),
        dimensions("x1", 1, 8),
        dtype_of("x2", "x1"),
        shape_of("x2", "x1"),
        dtype_of("gamma", "x1"),
        _gamma_ends_input("gamma", "x1"),
    ),
)

_SUMMANDS = (
    dtype("x1", *FLOATS),
    dimensions("x1", 1, 8),
    dtype_of("x2", "x1"),
    shape_of("x2", "x1"),
    Limit("gamma", "the dtype of x1, or float32", lambda a: a.gamma.dtype in (a.x1.dtype, torch.float32)),
    _gamma_ends_input("gamma", "x1"),
)
_ADD_LAYER_NORM_SOURCE = "aclnnAddLayerNorm, Atlas A2 and A3"
_ADD_LAYER_NORM_NOTE = "On hardware x1 and x2 may differ in dtype, which the simulator does not support."

ADD_LAYER_NORM = Limits(
    _ADD_LAYER_NORM_SOURCE,
    (
        *_SUMMANDS,
        shape_of("beta", "gamma"),
        dtype_of("beta", "gamma"),
        Limit("epsilon", "1e-5", lambda a: a.epsilon == 1e-5),
    ),
    _ADD_LAYER_NORM_NOTE,
)

ADD_LAYER_NORM_BACKWARD = Limits(
    _ADD_LAYER_NORM_SOURCE + "; aclnnAddLayerNormGrad",
    (
        *_SUMMANDS,
        shape_of("dy_opt", "x1"),
        dtype_of("dy_opt", "x1"),
        shape_of("dsum_opt", "x1"),
        dtype_of("dsum_opt", "x1"),
        dtype("rstd", torch.float32),
        dtype("mean", torch.float32),
    ),
    _ADD_LAYER_NORM_NOTE,
)

LIMITS = {
    "npu_add_layer_norm": ADD_LAYER_NORM,
    "npu_add_layer_norm_backward": ADD_LAYER_NORM_BACKWARD,
    "npu_rms_norm": RMS_NORM,
    "npu_rms_norm_backward": RMS_NORM_BACKWARD,
    "npu_add_rms_norm": ADD_RMS_NORM,
}
