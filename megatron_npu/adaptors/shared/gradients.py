"""Gradients of vectors, of biases and norms, added to Megatron's buffer in one call at the end of backward.

Both trees' DDP adds each in a launch of its own, eight a layer; vectors that wait cost no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.ops.multi_tensor import group_by_dtypes

WHY = "it adds the gradient of every bias and norm to the buffer in a launch, eight a layer"

_MAY_WAIT = "megatron_npu_may_wait"

# Of the backward pass that runs: parameter -> its part of the gradient buffer and its new gradient.
_waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}


def let_wait(parameter: Tensor, total: Tensor) -> None:
    """Take a parameter's gradient away, to be added to ``total`` when the backward pass that runs ends."""
    assert parameter.grad is not None
    _let_wait(parameter, total, parameter.grad)
    parameter.grad = None


def may_wait(parameter: Any) -> None:
    """Say that a parameter has a gradient buffer, to which ``keep`` may add at the end of the pass."""
    setattr(parameter, _MAY_WAIT, True)


def keep(parameter: Any, grad: Tensor) -> bool:
    """Take an fp32 gradient that autograd need not see, as its sum is what upstream wants; False if not.

    In fp32, which the buffer has as a rule: what autograd is given is rounded to the parameter's dtype first.
    """
    if not getattr(parameter, _MAY_WAIT, False):
        return False
    _let_wait(parameter, parameter.main_grad, grad)
    return True


def _let_wait(parameter: Tensor, total: Tensor, grad: Tensor) -> None:
    if parameter in _waiting:  # a backward pass inside another one, of recomputation
        _add_waiting()
    _waiting[parameter] = total, grad
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
