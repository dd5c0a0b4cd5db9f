"""``megatron.text_generation``."""

from __future__ import annotations

import torch

from megatron_npu import devices
from megatron_npu.hosts.megatron_lm.records import WITHOUT_CUDA, replace


@replace(
    "megatron.text_generation.communication:_is_cuda",
    devices=WITHOUT_CUDA,
    why="it asserts is_cuda, which is true of CUDA tensors only",
)
def _is_cuda(tensor: torch.Tensor | None) -> None:
    """Check that the tensor is there and on this process's device."""
    assert tensor is not None
    assert tensor.device.type == devices.current().name
