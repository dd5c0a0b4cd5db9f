"""Stub for ``apex.multi_tensor_apply``."""

from megatron_npu.ops.optimizers.multi_tensor import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)  # apex's own chunk size
