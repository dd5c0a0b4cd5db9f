"""Recognize device arguments that refer to CUDA, and convert them to this process's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.devices.base import Device

Target = Callable[[Any], Any]


def names_cuda(text: str) -> bool:
    """Return True if a string is ``cuda``, or ``cuda:`` and an index."""
    return text == "cuda" or text.startswith("cuda:")


def means_cuda(argument: Any) -> bool:
    """Return True if a device argument refers to a CUDA device.

    Integer indices also refer to CUDA.
    """
    if isinstance(argument, str):
        return names_cuda(argument)
    if isinstance(argument, int):
        return not isinstance(argument, bool)
    return isinstance(argument, torch.device) and argument.type == "cuda"


def target_on(device: Device) -> Target:
    """Return a function that converts device arguments to a ``torch.device`` on ``device``.

    The index is kept, except on a CPU, which has no index. Arguments that do not refer to CUDA are returned
    unchanged.
    """

    def target(argument: Any) -> Any:
        if not means_cuda(argument):
            return argument
        index = argument if isinstance(argument, int) else torch.device(argument).index
        if device.is_host or index is None:
            return torch.device(device.name)
        return torch.device(device.name, index)

    return target
