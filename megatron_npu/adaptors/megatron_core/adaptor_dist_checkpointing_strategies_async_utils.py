"""``megatron.core.dist_checkpointing.strategies.async_utils``: --use-persistent-ckpt-worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, wrap


@wrap(
    "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.schedule_async_call",
    devices=WITHOUT_CUDA,
    why="it hands the training's own tensors to another process, which copies them to the host: on a cpu "
    "that copies nothing, and the checkpoint gets the weights of later iterations; on an npu it needs the "
    "sharing of device memory between processes",
)
def copy_before_handing_over(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Bring the tensors to the host in this process, into memory that training does not write to."""

    @functools.wraps(original)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.preload_fn is not None:
            rank, _, *rest = async_req.async_fn_args
            copies = tree_map_only(torch.Tensor, _own, async_req.preload_fn())
            async_req = async_req._replace(async_fn_args=[rank, copies, *rest], preload_fn=None)
        original(self, async_req)

    return schedule_async_call


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory of its own; ``.cpu()`` of a cpu tensor is the tensor itself."""
    return tensor.detach().clone()
