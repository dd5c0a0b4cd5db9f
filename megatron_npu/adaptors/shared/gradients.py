"""Add gradients directly to Megatron's buffers, without passing them through autograd.

Gradients of vectors (biases and norms) are added to the buffer in one call at the end of the backward pass
instead of one launch per vector, of which there are eight per layer. Deferred vectors need little memory. On
a cpu, gradients of the word table are added only for the rows that were read. This avoids a table of zeros,
its sum with the output layer's gradient, and a pass over the buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops.optimizers.multi_tensor import group_by_dtypes

WHY = (
    "upstream adds the gradient of every bias and norm to the buffer in a separate launch, eight per "
    "layer, and the full word embedding, which is mostly zeros"
) + LAUNCHES_COUNTED

_MAY_WAIT, _TAKES_ROWS = "megatron_npu_may_wait", "megatron_npu_takes_rows"

# Of the backward pass that runs: parameter -> its part of the gradient buffer and its new gradient.
_waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}


def let_wait(parameter: Tensor, total: Tensor) -> None:
    """Defer a parameter's gradient until the current backward pass ends, and then add it to ``total``."""
    assert parameter.grad is not None
    _let_wait(parameter, total, parameter.grad)
    parameter.grad = None


def may_wait(parameter: Any) -> None:
    """Record that ``keep`` may delay additions to a parameter's gradient buffer until the backward pass
    ends.
    """
    setattr(parameter, _MAY_WAIT, True)


def keep(parameter: Any, grad: Tensor) -> bool:
    """Accumulate an fp32 gradient without autograd. Return False if that is not possible.

    The buffer usually has dtype fp32, whereas autograd would first round the gradient to the parameter's
    dtype.
    """
    if not getattr(parameter, _MAY_WAIT, False):
        return False
    _let_wait(parameter, parameter.main_grad, grad)
    return True


def may_take_rows(parameter: Any) -> None:
    """Record that no part of a table's gradient buffer is sent to other ranks before the backward pass
    ends.
    """
    setattr(parameter, _TAKES_ROWS, True)


def takes_rows(parameter: Any) -> bool:
    """Return True if ``may_take_rows`` was called for a table, so that autograd need not return its
    gradient.
    """
    return getattr(parameter, _TAKES_ROWS, False)


def keep_rows(table: Any, rows: Tensor, grad: Tensor) -> bool:
    """Add gradients ``[..., h]`` of the given table rows ``[...]`` to the table's gradient buffer.

    Return False if the table has no buffer.
    """
    if not takes_rows(table):
        return False
    total = table.main_grad
    total.index_add_(0, rows.reshape(-1), grad.reshape(-1, grad.size(-1)).to(total.dtype))
    return True


def _let_wait(parameter: Tensor, total: Tensor, grad: Tensor) -> None:
    if parameter in _waiting:  # a backward pass inside another one, of recomputation
        _add_waiting()
    _waiting[parameter] = total, grad
    # Each time: should a pass fail, the next one adds what it has left behind, as upstream does.
    torch.autograd.Variable._execution_engine.queue_callback(_add_waiting)


def _add_waiting() -> None:
    """Add the deferred gradients to their buffers, in one call for each pair of dtypes."""
    waiting = list(_waiting.values())
    _waiting.clear()
    for totals, grads in group_by_dtypes(waiting):
        with torch.no_grad():
            if totals[0].dtype is not grads[0].dtype:  # torch's fused kernels take equal dtypes only
                given_grads, grads = grads, [torch.empty_like(total) for total in totals]
                torch._foreach_copy_(grads, given_grads)
            torch._foreach_add_(totals, grads)
