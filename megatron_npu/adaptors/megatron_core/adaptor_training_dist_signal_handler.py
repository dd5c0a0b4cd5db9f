"""``megatron.training.dist_signal_handler``: --exit-signal-handler."""

from __future__ import annotations

import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace


@replace(
    "megatron.training.dist_signal_handler:get_device",
    devices=WITHOUT_CUDA,
    why="it knows nccl and gloo: any other backend, HCCL too, is a RuntimeError without a word",
)
def get_device(local_rank: int | None = None) -> torch.device:
    """Return the device of this process, whose tensors its backend gathers."""
    return devices.current().torch_device()
