"""Scratch memory that is reused by every tile of a call."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Uninitialised memory on the CPU by name, as large as the largest tile has asked for."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor; the same memory for the same name, which has one dtype."""
        count = torch.Size(shape).numel()
        if name not in self._flat or self._flat[name].numel() < count:
            self._flat[name] = torch.empty(count, dtype=dtype, device="cpu")
        return self._flat[name][:count].view(shape)
