"""Define the limits on the arguments of dropout with a packed mask."""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import Limits, between, dtype
from megatron_npu.sim.kernels.limits.common import FLOATS

DROPOUT = Limits("wheel, _npu_dropout", (dtype("input", *FLOATS), between("p", 0.0, 1.0)))
DROPOUT_MASK = Limits("op-plugin, DropoutGenMaskKernelNpu.cpp", (between("p", 0.0, 1.0),))

LIMITS = {
    "_npu_dropout": DROPOUT,
    "_npu_dropout_gen_mask.Tensor": DROPOUT_MASK,
}
