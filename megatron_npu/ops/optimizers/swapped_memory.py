"""Allocate NPU tensors in host memory, where NPU kernels read and write them directly.

torch_npu documents such tensors for ``fill_``, ``zero_`` and ``npu_apply_adam_w``, and CANN documents such
memory for copies; other operations on them have not been tested on hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Nothing of torch_npu tells them from others; an attribute would go into what torch.save writes.
_made = WeakIdKeyDictionary()


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous zeros in host memory with the shape and device of ``like``.

    Args:
        like: an NPU tensor with at least one element.
        dtype: dtype of the result.
    """
    import torch_npu

    result = torch_npu.empty_with_swapped_memory(like.shape, dtype=dtype, device=like.device).zero_()
    _made[result] = None
    return result


def moved(tensor: Tensor, like: Tensor) -> Tensor:
    """Move ``tensor`` from any device to host memory that is accessible to the device of ``like``."""
    return tensor if is_swapped(tensor) else zeros(like, tensor.dtype).copy_(tensor)


def is_swapped(tensor: Tensor) -> bool:
    """Return True if ``tensor`` was created by this module.

    A view or a copy does not count.
    """
    return tensor in _made
