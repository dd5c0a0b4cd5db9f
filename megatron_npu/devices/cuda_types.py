"""Provide ``torch.cuda.FloatTensor`` and similar types on any device."""

from __future__ import annotations

from typing import Any

import torch

_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class TensorType(type):
    """Metaclass of ``torch.cuda.FloatTensor`` and similar types, which supports calls and ``isinstance``.

    These types must be classes, because ``megatron.core.transformer.module`` uses them with isinstance.
    """

    dtype: torch.dtype
    device: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype is cls.dtype
            and instance.device.type == cls.device
        )

    def __call__(cls, *arguments: Any) -> torch.Tensor:
        if arguments and not isinstance(arguments[0], int):
            return torch.tensor(arguments[0], dtype=cls.dtype, device=cls.device)
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, device=cls.device)


def tensor_types(device: str) -> dict[str, type]:
    """Return ``FloatTensor``, ``LongTensor`` and similar types for tensors on ``device``."""
    return {name: TensorType(name, (), {"dtype": dtype, "device": device}) for name, dtype in _TYPES.items()}
