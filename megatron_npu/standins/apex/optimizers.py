"""Stand-in for ``apex.optimizers``."""

from megatron_npu.ops.adam import FusedAdam
from megatron_npu.ops.sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
