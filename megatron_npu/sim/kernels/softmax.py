"""Define reference kernels for Megatron's fused softmax, ``softmax(scale · x)`` with masked scores set to
-10000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

# The value that Megatron's fused kernel and Ascend's give to masked scores: not -inf, so that a row without
# any allowed score becomes uniform instead of nan.
MASKED_SCORE = -10000.0


@kernel("npu_scaled_masked_softmax")
def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> Tensor:
    """Return the softmax of ``x`` ``[n, c, h, w]`` over the last dimension, computed in fp32."""
    scores = (x.float() * float(scale)).masked_fill(_masked(x, mask, fixed_triu_mask), MASKED_SCORE)
    return torch.softmax(scores, -1).to(x.dtype)


@kernel("npu_scaled_masked_softmax_backward")
def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    """Return the gradient of ``x``, which is zero at masked positions."""
    grad, probabilities = y_grad.float(), y.float()
    scores = (grad - (grad * probabilities).sum(-1, keepdim=True)) * probabilities * float(scale)
    return scores.masked_fill(_masked(y, mask, fixed_triu_mask), 0.0).to(y_grad.dtype)


def _masked(x: Tensor, mask: Tensor, fixed_triu_mask: bool) -> Tensor:
    """Return a mask that is True where the given mask is or, with ``fixed_triu_mask``, above the diagonal."""
    if fixed_triu_mask:
        return torch.ones(x.shape[-2:], dtype=torch.bool).triu_(1)
    return mask.bool()
