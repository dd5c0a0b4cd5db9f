"""Patch ``megatron.optimizer``: its multi-tensor calls, and its gradient buffers for current torch
versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared import optimizer
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops.optimizers import multi_tensor

replace(
    "megatron.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies bf16 tensor by tensor, with one launch per parameter" + LAUNCHES_COUNTED,
)(multi_tensor.copy_all)

for _target in (
    "distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
    "distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads",
    "optimizer:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
):
    around(f"megatron.optimizer.{_target}", why=optimizer.WHY)(optimizer.copy_together)


@around(
    "megatron.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    why="upstream reinterprets the gradient buffers through TypedStorage._untyped, renamed in torch 2.0",
)
def initialise_with_views(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Provide a method under its old name during the call, and afterwards make the buffers views of the
    same memory.
    """
    with _untyped_storage_by_its_old_name():
        original(self, *args, **kwargs)
    self.param_buffers = [
        {
            dtype: buffer.data.view(self.params_dtype)[: buffer.numel_padded]
            for dtype, buffer in model._grad_buffers.items()
        }
        for model in self.models
    ]


@contextlib.contextmanager
def _untyped_storage_by_its_old_name() -> Iterator[None]:
    storage: Any = torch.storage.TypedStorage
    if hasattr(storage, "_untyped"):
        yield
        return
    storage._untyped = storage.untyped
    try:
        yield
    finally:
        del storage._untyped
