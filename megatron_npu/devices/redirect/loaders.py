"""Make DataLoaders on a CPU use the host's generator, as they do on a machine with a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import dataloader

from megatron_npu.devices.base import Device, Replacement

# A loader draws a seed when it is iterated, a sampler at its first index, a data set perhaps at any sample.
_DRAWING = (
    (dataloader.DataLoader, "__iter__"),
    (dataloader._BaseDataLoaderIter, "_next_index"),
    (dataloader._SingleProcessDataLoaderIter, "_next_data"),
)


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for methods of torch's loaders that use random numbers in this process."""
    if device.is_host:
        for owner, name in _DRAWING:
            yield owner, name, _on_host(device, getattr(owner, name))


def _on_host(device: Device, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that draws its random numbers from the host's generator."""

    @functools.wraps(method)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        with device.host_rng():
            return method(*args, **kwargs)

    return on_host
