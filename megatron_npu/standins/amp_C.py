# ruff: noqa: N999 (the name is apex's)
"""Stub for ``amp_C``, apex's extension with multi-tensor kernels."""

from megatron_npu.ops.optimizers.multi_tensor import multi_tensor_l2norm, multi_tensor_scale

__all__ = ["multi_tensor_l2norm", "multi_tensor_scale"]
