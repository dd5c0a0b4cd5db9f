"""Gradients of vectors, of biases and norms, added to Megatron's buffer in one call at the end of backward.

Both trees' DDP adds each in a launch of its own, eight a layer; vectors that wait cost no memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.multi_tensor import group_by_dtypes

WHY = "it adds the gradient of every bias and norm to the buffer in a launch, eight a layer"

# Of the backward pass that runs: parameter -> its part of the gradient buffer and its new gradient.
_waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}


def let_wait(parameter: Tensor, total: Tensor) -> None:
    """Take a parameter's gradient away, to be added to ``total`` when the backward pass that runs ends."""
    assert parameter.grad is not None
    if parameter in _waiting:  # a backward pass inside another one, of recomputation
        _add_waiting()
    _waiting[parameter] = total, parameter.grad
    parameter.grad = None
    # Each time: should a pass fail, the next one adds what it has left behind, as upstream does.
    torch.autograd.Variable._execution_engine.queue_callback(_add_waiting)


def _add_waiting() -> None:
    """Add the gradients that wait, in one call for each pair of dtypes."""
    waiting = list(_waiting.values())
    _waiting.clear()
    for totals, grads in group_by_dtypes(waiting):
        with torch.no_grad():
            if totals[0].dtype is not grads[0].dtype:  # torch's fused kernels take equal dtypes only
                given_grads, grads = grads, [torch.empty_like(total) for total in totals]
                torch._foreach_copy_(grads, given_grads)
            torch._foreach_add_(totals, grads)
