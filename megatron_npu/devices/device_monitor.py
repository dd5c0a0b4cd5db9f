"""Replace the functions of ``torch.cuda`` that read GPU sensors with equivalents for other devices.

Megatron's straggler detector (``--log-straggler``) and ``--log-device-memory-used`` read them. Values that
are not measured are nan, never a number that could be mistaken for a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import psutil


def unknown(device: Any = None) -> float:
    """Return nan, because this device has no such sensor."""
    return math.nan


def cpu_sensors() -> dict[str, Callable[..., Any]]:
    """Return replacements for functions of ``torch.cuda`` that report on this machine's processors and
    memory.
    """
    psutil.cpu_percent()  # the first call only starts the measurement
    return {
        "mem_get_info": _free_and_total,
        "device_memory_used": _used,
        "utilization": utilization,
        "temperature": _temperature,
        "clock_rate": _clock_rate,
        "power_draw": unknown,
    }


def _free_and_total(device: Any = None) -> tuple[int, int]:
    """Return the available and the total memory of the machine in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _used(device: Any = None) -> int:
    """Return the number of bytes of memory that all processes use."""
    return psutil.virtual_memory().used


def utilization(device: Any = None) -> float:
    """Return the percentage of time in which the processors were busy since the previous call."""
    return psutil.cpu_percent()


def _temperature(device: Any = None) -> float:
    """Return the temperature of the hottest sensor in degrees Celsius, or nan if the system reports none."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((sensor.current for group in sensors.values() for sensor in group), default=math.nan)


def _clock_rate(device: Any = None) -> float:
    """Return the mean processor frequency in MHz, or nan if the system does not report it."""
    frequency = psutil.cpu_freq()
    return math.nan if frequency is None else frequency.current
