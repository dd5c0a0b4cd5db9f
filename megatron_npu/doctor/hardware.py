"""List the available devices with their names and free memory."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import Device

SHARED_MEMORY = Path("/dev/shm")


def device_list() -> dict[str, Any]:
    """Return the selected devices and, for each kind of device, their number or the reason why there are
    none.

    ``each`` lists the devices of the selected kind with ``device``, ``model``, ``free_mib`` and
    ``total_mib``; the last two are present only if the device's module in torch reports them. The model of a
    device whose module has no ``get_device_name`` is the name of its kind.
    """
    kinds = devices.every()
    reasons = {device.name: device.absence() for device in kinds}
    result: dict[str, Any] = {
        device.name: reasons[device.name] or f"{device.count()} with {device.backend}" for device in kinds
    }
    try:
        selected = devices.select(settings.DEVICE.get())
    except UsageError as error:
        return result | {"error": str(error)}
    result["selected"] = selected.name
    result["each"] = _each(selected)
    if SHARED_MEMORY.is_dir():
        result["shared_memory_mib"] = shutil.disk_usage(SHARED_MEMORY).total >> 20
    return result


def _each(device: Device) -> list[dict[str, Any]]:
    if device.is_host:
        memory = psutil.virtual_memory()
        return [_row(device.name, _cpu_model(), memory.available, memory.total)]
    module = torch.get_device_module(device.name)
    rows = []
    for index in range(device.count()):
        name = f"{device.name}:{index}"
        model = module.get_device_name(index) if hasattr(module, "get_device_name") else device.name
        if hasattr(module, "mem_get_info"):
            rows.append(_row(name, model, *module.mem_get_info(index)))
        else:
            rows.append({"device": name, "model": model})
    return rows


def _row(device: str, model: str, free: int, total: int) -> dict[str, Any]:
    return {"device": device, "model": model, "free_mib": free >> 20, "total_mib": total >> 20}


def _cpu_model() -> str:
    """Return the name of the CPU, its number of logical cores, and the vector instructions that torch
    uses.
    """
    return f"{processor()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def processor() -> str:
    """Return the name of the processor's model, or its architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # other systems and other processors
        return platform.processor() or platform.machine()
