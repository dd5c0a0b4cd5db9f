"""GPU sensors of ``torch.cuda``, as far as other devices have them.

Megatron's straggler detector (``--log-straggler``) and ``--log-device-memory-used`` read them. Values that
are not measured are nan, never a number that looks like a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import psutil


def unknown(device: Any = None) -> float:
    """Return nan: this device has no such sensor."""
    return math.nan


def cpu_sensors() -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` that read the machine's processors and memory here."""
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
    """Return the bytes that are still available, and the machine's total."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _used(device: Any = None) -> int:
    """Return the bytes in use by all processes together."""
    return psutil.virtual_memory().used


def utilization(device: Any = None) -> float:
    """Return the percentage of time in which the processors were busy since the last call."""
    return psutil.cpu_percent()


def _temperature(device: Any = None) -> float:
    """Return the degrees Celsius of the hottest sensor; nan where the system shows none."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((sensor.current for group in sensors.values() for sensor in group), default=math.nan)


def _clock_rate(device: Any = None) -> float:
    """Return the mean frequency of the processors in MHz; nan where the system does not say."""
    frequency = psutil.cpu_freq()
    return math.nan if frequency is None else frequency.current
