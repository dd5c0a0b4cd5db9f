"""Patch ``megatron.model.distributed``, whose DDP stores gradients in one buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import gradients


@around("megatron.model.distributed:DistributedDataParallel._make_param_hook", why=gradients.WHY)
def add_vectors_together(original: Callable[..., Any], self: Any, param: Any) -> Callable[..., None]:
    """Add the gradients of vectors at the end of the backward pass, and update only the table rows that
    were read.
    """
    if param.dim() != 1:
        gradients.may_take_rows(param)
        return original(self, param)
    gradients.may_wait(param)

    def param_hook(*unused: Any) -> None:
        if param.grad is not None:
            gradients.let_wait(param, param.main_grad)

    return param_hook
