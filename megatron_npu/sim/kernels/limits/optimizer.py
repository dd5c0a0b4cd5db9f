"""Define the limits on the arguments of the fused AdamW step."""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, not_simulated
from megatron_npu.sim.kernels.limits.common import FLOATS

APPLY_ADAM_W = Limits(
    "wheel, npu_apply_adam_w",
    (
        Limit("out", "three tensors: var, m, v", lambda a: len(a.out) == 3),
        dtype("out", *FLOATS),
        dimensions("out", 1, 8),
        Limit("out", "one dtype", lambda a: len({t.dtype for t in a.out}) == 1),
        Limit("out", "one shape", lambda a: len({t.shape for t in a.out}) == 1),
        dtype_of("grad", "out"),
        Limit("grad", "the shape of var", lambda a: a.grad.shape == a.out[0].shape),
        not_simulated("amsgrad", False),
    ),
    "amsgrad: the documents disagree on where the largest second moment is kept, and op-plugin's source says "
    "that the operation of Atlas A2 takes only False.",
)

LIMITS = {
    "npu_apply_adam_w.out": APPLY_ADAM_W,
}
