"""``megatron.model.distributed``: the DDP that keeps gradients in one buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.ops.multi_tensor import group_by_dtypes

# Of the backward pass that runs: parameter -> its part of the gradient buffer and its new gradient.
_waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}


@around(
    "megatron.model.distributed:DistributedDataParallel._make_param_hook",
    why="it adds the gradient of every bias and norm to the buffer in a launch, eight a layer",
)
def add_vectors_together(original: Callable[..., Any], self: Any, param: Any) -> Callable[..., None]:
    """Let the gradients of vectors, which cost no memory, wait for the end of the backward pass."""
    if param.dim() != 1:
        return original(self, param)

    def param_hook(*unused: Any) -> None:
        if param.grad is None:
            return
        if param in _waiting:  # a backward pass inside another one, of recomputation
            _add_waiting()
        _waiting[param] = param.main_grad, param.grad
        param.grad = None
        # Each time: should a pass fail, the next one adds what it has left behind, as upstream does.
        torch.autograd.Variable._execution_engine.queue_callback(_add_waiting)

    return param_hook


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
