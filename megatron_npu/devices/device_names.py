"""Device arguments that name CUDA, and the devices that they are mapped to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.devices.base import Device

Target = Callable[[Any], Any]


def names_cuda(text: str) -> bool:
    """Return True if a string is ``cuda``, or ``cuda:`` with an index."""
    return text == "cuda" or text.startswith("cuda:")


def means_cuda(argument: Any) -> bool:
    """Return True if a device argument names a CUDA device; an integer index also does."""
    if isinstance(argument, str):
        return names_cuda(argument)
    if isinstance(argument, int):
        return not isinstance(argument, bool)
    return isinstance(argument, torch.device) and argument.type == "cuda"


def target_on(device: Device) -> Target:
    """Return a function that maps device arguments to ``torch.device`` on ``device``.

    The index is kept, except on a CPU, which has none. Arguments that do not name CUDA are returned
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
