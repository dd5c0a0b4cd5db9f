"""Compute the gradient of a bias that was added to every row."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """Sum the rows of ``grad`` ``[..., h]`` in fp32, and return the result in the bias's dtype."""
    if bias is None:
        return None
    rows = grad.reshape(-1, grad.size(-1))
    if rows.device.type == "cpu" and bias.dtype is rows.dtype:
        return rows.sum(0)  # adds 16 bits up in fp32 too; asked for fp32, torch copies the tensor first
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(bias.dtype)
