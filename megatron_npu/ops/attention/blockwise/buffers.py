"""Provide scratch memory that all tiles of an attention call share."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Named, uninitialized CPU scratch buffers, each as large as the largest request for it so far."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor that uses the memory of the buffer ``name``.

        Each buffer always has the same dtype.
        """
        count = torch.Size(shape).numel()
        if name not in self._flat or self._flat[name].numel() < count:
            self._flat[name] = torch.empty(count, dtype=dtype, device="cpu")
        return self._flat[name][:count].view(shape)
