"""What ``torch.cuda`` reads off a GPU's instruments, as far as other devices have such instruments.

Megatron's straggler detector and ``--log-device-memory-used`` ask for these. What nobody measures is nan,
never a number that looks measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import psutil


def unknown(device: Any = None) -> float:
    """Return nan: this device has no such instrument."""
    return math.nan


def of_the_host() -> dict[str, Callable[..., Any]]:
    """Return the names of ``torch.cuda`` that read this machine's processors and memory."""
    psutil.cpu_percent()  # the first call starts the measurement and returns nothing of use
    return {
        "mem_get_info": _free_and_total,
        "device_memory_used": _used,
        "utilization": _utilization,
        "temperature": _temperature,
        "clock_rate": _clock_rate,
        "power_draw": unknown,
    }


def _free_and_total(device: Any = None) -> tuple[int, int]:
    """Return the bytes that processes can still get, and those that the machine has."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _used(device: Any = None) -> int:
    """Return the bytes that all processes use."""
    return psutil.virtual_memory().used


def _utilization(device: Any = None) -> float:
    """Return the percentage of time that the processors have worked since the last call."""
    return psutil.cpu_percent()


def _temperature(device: Any = None) -> float:
    """Return the degrees Celsius of the hottest sensor; nan where the system shows none."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((sensor.current for group in sensors.values() for sensor in group), default=math.nan)


def _clock_rate(device: Any = None) -> float:
    """Return the mean frequency of the processors in MHz; nan where the system does not tell."""
    frequency = psutil.cpu_freq()
    return math.nan if frequency is None else frequency.current
