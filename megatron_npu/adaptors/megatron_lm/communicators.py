"""Support ``--hccl-group-buffer-adaptive`` for the process groups of ``mpu`` and the local DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import communicators
from megatron_npu.options import hccl_buffers

# The sizes that the arguments tell, and the names that megatron-core has given the groups since.
_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
}


@around("megatron.core.parallel_state:initialize_model_parallel", devices=("npu",), why=communicators.WHY)
def fit_buffers(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Choose the buffer sizes of those groups whose message sizes follow from the arguments."""
    original(*args, **kwargs)
    if not hccl_buffers.asked():
        return
    from megatron.core import parallel_state

    for group, name in _GROUPS.items():
        if (found := getattr(parallel_state, group)) is not None:
            communicators.fit_group(found, name)


@around(
    "megatron.model.distributed:DistributedDataParallel.__init__", devices=("npu",), why=communicators.WHY
)
def fit_buffers_of_gradients(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Choose the buffer size of the group that reduces the gradient buffers.

    Each buffer is reduced in one call.
    """
    original(self, *args, **kwargs)
    if not hccl_buffers.asked() or not self._grad_buffers:
        return
    from megatron.core import parallel_state

    buffers = [buffer.data for buffer in self._grad_buffers.values()]
    largest = max(buffer.numel() * buffer.element_size() for buffer in buffers)
    communicators.fit_buffer(parallel_state.get_data_parallel_group(), largest, "dp")
