"""Stub for ``apex.optimizers``."""

from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.ops.optimizers.sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
