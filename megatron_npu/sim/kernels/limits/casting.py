"""Define the limits on the arguments of casts between dtypes and memory formats."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import Limits, not_simulated, one_of

# torch's ScalarType numbers, which npu_dtype_cast takes instead of a dtype. torch_npu's own dtypes (int4,
# hifloat8, float4) have numbers of 285 and more and are not simulated.
SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    11: torch.bool,
    15: torch.bfloat16,
}

DTYPE_CAST = Limits(
    "wheel, npu_dtype_cast; op-plugin, meta registrations",
    (one_of("dtype", *SCALAR_TYPES), not_simulated("input_dtype")),
)

DTYPE_CAST_BACKWARD = Limits(
    DTYPE_CAST.source, (one_of("grad_dtype", *SCALAR_TYPES), not_simulated("input_dtype"))
)

FORMAT_CAST = Limits(
    "wheel, npu_format_cast", (not_simulated("customize_dtype"), not_simulated("input_dtype"))
)

LIMITS = {
    "npu_dtype_cast": DTYPE_CAST,
    "npu_dtype_cast_backward": DTYPE_CAST_BACKWARD,
    "npu_format_cast": FORMAT_CAST,
    "npu_format_cast_.acl_format": FORMAT_CAST,
}
