"""Convert the settings of the simulator to the form that its C++ code reads."""

from __future__ import annotations

from megatron_npu.base import settings
from megatron_npu.process import visible_devices

_TOLD = {
    "devices": settings.SIM_DEVICES,
    "soc": settings.SIM_SOC,
    "memory": settings.SIM_MEMORY,
    "dry": settings.SIM_DRY,
    "memcheck": settings.SIM_MEMCHECK,
    "verbose": settings.SIM_VERBOSE,
    "hccl_timeout": settings.SIM_HCCL_TIMEOUT,
    "hccl_delay": settings.SIM_HCCL_DELAY,
    "host": settings.SIM_HOST,
}


def simulator_values() -> dict[str, str]:
    """Return the settings for the C++ code, keyed by short names (see ``setting`` in csrc/runtime.h).

    Raises:
        UsageError: a variable has a value that is not accepted.
    """
    values = {name: str(variable.value()) for name, variable in _TOLD.items()}
    visible = visible_devices.listed(visible_devices.ASCEND, int(values["devices"]))
    return values if visible is None else values | {"devices": str(len(visible))}
