"""Select the device of this process once, from ``MEGATRON_NPU_DEVICE`` or as the first available device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.devices.base import Device, MemoryStatistics
from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.cuda import CudaDevice
from megatron_npu.devices.npu import NpuDevice
from megatron_npu.process import visible_devices

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "MemoryStatistics",
    "NpuDevice",
    "board_folder",
    "current",
    "every",
    "present",
    "select",
]

_KINDS: dict[str, type[Device]] = {"npu": NpuDevice, "cuda": CudaDevice, "cpu": CpuDevice}


def select(name: str) -> Device:
    """Return the device with the given name.

    ``auto`` selects the first available device.

    Raises:
        UsageError: the named device is not available; or an environment variable selects NPUs, but none of
            them exists, and ``auto`` would silently use the CPU.
    """
    if name == "auto":
        device = next(device for device in every() if device.absence() is None)
        if device.is_host:
            _require_no_chosen_npus()
        return device
    device = _KINDS[name]()
    reason = device.absence()
    if reason is not None:
        raise UsageError(
            f"{settings.DEVICE.name}={name} requires a machine with a usable {name} device, but "
            f"{reason} (usable here: {', '.join(present())}). Install the missing software, or set "
            f"{settings.DEVICE.name}=auto."
        )
    return device


def _require_no_chosen_npus() -> None:
    chosen = visible_devices.listed(visible_devices.ASCEND)
    # without an importable torch_npu, there are no NPUs, and the variable is another machine's
    if chosen and hasattr(torch, "npu") and not torch.npu.is_available():
        value = os.environ[visible_devices.ASCEND]
        raise UsageError(
            f"{visible_devices.ASCEND} or {visible_devices.CUDA} selects the NPUs {value}, but this machine "
            "has no such NPUs",
            remedy=f"List only existing NPUs in the variable, or set {settings.DEVICE.name}=cpu.",
        )


def every() -> list[Device]:
    """Return one object for each device type, available or not, in the order in which ``auto`` tries them."""
    return [kind() for kind in _KINDS.values()]


def present() -> list[str]:
    """Return the names of the available devices, in the order in which ``auto`` tries them."""
    return [device.name for device in every() if device.absence() is None]


@cache
def current() -> Device:
    """Return the device of this process, selecting it on the first call."""
    return select(settings.DEVICE.get())


def board_folder(folder: str) -> str:
    """Return the folder for the TensorBoard files of a run.

    TensorBoard shows the folder's name as the name of the run.

    The curves of a simulated device are in a subfolder whose name says that they are simulated.
    """
    device = current()
    return str(Path(folder) / device.title.replace(" ", "-")) if device.simulated else folder
