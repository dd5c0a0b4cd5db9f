"""Define reference kernels for casts between dtypes, and between the memory formats of the device.

The simulator does not have these memory formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.limits.casting import SCALAR_TYPES
from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_dtype_cast")
def npu_dtype_cast(input: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """Return a copy of ``input`` in the dtype with the given ScalarType number."""
    return input.to(SCALAR_TYPES[dtype], copy=True)


@kernel("npu_dtype_cast_backward")
def npu_dtype_cast_backward(
    grad: Tensor, dtype: torch.dtype, grad_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return the gradient in the dtype of the forward pass's input."""
    return grad.to(dtype, copy=True)


@kernel("_npu_dtype_cast")
def npu_private_dtype_cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of ``input`` in ``dtype``. On the device, ``Tensor.to`` calls this operation."""
    return input.to(dtype, copy=True)


@kernel("_npu_dtype_cast_backward")
def npu_private_dtype_cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient in the dtype of the forward pass's input."""
    return grad.to(dtype, copy=True)


@kernel("npu_format_cast")
def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return a copy in the plain memory format, regardless of the requested format.

    torch_npu itself does the same while its private formats are disabled
    (``torch.npu.config.allow_internal_format = False``), so values and shapes match such a device.
    """
    return input.clone()


@kernel("_npu_format_cast")
def npu_private_format_cast(input: Tensor, acl_format: int) -> Tensor:
    """Return a copy in the plain memory format."""
    return input.clone()


@kernel("npu_format_cast_.acl_format")
def npu_format_cast_in_place(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return ``input`` unchanged, because it already has the plain memory format."""
    return input
