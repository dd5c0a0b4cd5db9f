"""Patch ``megatron.core.distributed``, whose DDP stores gradients in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, around
from megatron_npu.adaptors.shared import gradients


@around(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook",
    devices=WITHOUT_CUDA,  # on cuda a graph may be capturing the pass
    why=gradients.WHY,
)
def add_vectors_together(original: Callable[..., Any], self: Any, param: Any) -> Callable[..., None]:
    """Add the gradients of vectors at the end of the backward pass, and update only the table rows that were
    read.

    This is not done with --overlap-grad-reduce, which sends a part of the buffer as soon as it is complete.
    """
    hook = original(self, param)
    if self.ddp_config.overlap_grad_reduce:
        return hook
    if param.dim() != 1:
        gradients.may_take_rows(param)
        return hook
    gradients.may_wait(param)

    def hook_of_vector(*unused: Any) -> None:
        if param.grad is None or param.grad_added_to_main_grad or param not in self.param_to_bucket_group:
            hook(*unused)
        else:
            gradients.let_wait(param, param.main_grad)

    return hook_of_vector
