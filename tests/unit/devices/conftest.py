"""A redirected torch, for the device that is simulated around these tests, else the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.devices import Device
from megatron_npu.devices.redirect import Redirection


def this_device() -> Device:
    return devices.NpuDevice() if settings.SIM.enabled() else devices.CpuDevice()


@pytest.fixture
def redirection() -> Iterator[Redirection]:
    redirection = Redirection(this_device())
    redirection.on()
    yield redirection
    redirection.off()
