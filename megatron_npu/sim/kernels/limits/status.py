"""Define the limits on the arguments of operations on overflow flags."""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import Limits, one_of

FLOAT_STATUS = Limits(
    "wheel, npu_get_float_status; op-plugin, FloatStatusKernelNpu.cpp", (one_of("mode", 0, 1),)
)

LIMITS = {
    "npu_get_float_status": FLOAT_STATUS,
    "npu_clear_float_status": FLOAT_STATUS,
}
