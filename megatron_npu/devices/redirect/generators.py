"""Redirect torch's functions that use the default generator.

A CPU needs two generators (see ``CpuDevice``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from megatron_npu.devices.base import Device, Replacement
from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.redirect import callers


def replacements(device: Device) -> Iterator[Replacement]:
    """Yield the replacements for ``get_rng_state``, ``set_rng_state`` and ``manual_seed``.

    The replacements use the host's generator.
    """
    if not isinstance(device, CpuDevice):
        return
    get, put, seed = torch.get_rng_state, torch.set_rng_state, torch.manual_seed

    @functools.wraps(get)
    def get_rng_state() -> torch.Tensor:
        return device.host_rng_state() if callers.caller() in callers.MEAN_THE_HOST_GENERATOR else get()

    @functools.wraps(put)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if callers.caller() in callers.MEAN_THE_HOST_GENERATOR:
            device.set_host_rng_state(new_state)
        else:
            put(new_state)

    @functools.wraps(seed)
    def manual_seed(value: int) -> torch.Generator:
        if callers.caller_of_seeding() not in callers.MEAN_THE_DEVICE_GENERATOR:
            device.host_generator.manual_seed(value)
        return seed(value)

    for owner in (torch, torch.random):
        yield owner, "get_rng_state", get_rng_state
        yield owner, "set_rng_state", set_rng_state
        yield owner, "manual_seed", manual_seed
