"""The overflow flag: never set where inf and nan show, asked of the device where they do not."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from tests.support import processes


def test_inf_and_nan_are_left_to_the_numbers() -> None:
    device = devices.NpuDevice() if settings.SIM.enabled() else devices.CpuDevice()
    torch.full((2,), 3e38, device=device.torch_device()).mul_(10)
    device.clear_overflow()
    assert not device.overflowed()


@pytest.mark.skipif(not settings.SIM.enabled(), reason="needs an NPU")
def test_a_saturating_npu_is_asked() -> None:
    """The kernels are called; a simulated NPU never saturates, so that the answer is no."""
    code = """
import torch, torch_npu
from megatron_npu import devices
asked = []
for name in ("npu_get_float_status", "npu_clear_float_status"):
    kernel = getattr(torch_npu, name)
    setattr(torch_npu, name, lambda t, kernel=kernel, name=name: (asked.append(name), kernel(t))[1])
assert not torch_npu.npu.utils.is_support_inf_nan()
device = devices.NpuDevice()
device.clear_overflow()
assert device.overflowed() is False
assert asked == ["npu_clear_float_status", "npu_get_float_status"], asked
"""
    environment = {**os.environ, "INF_NAN_MODE_FORCE_DISABLE": "1", "INF_NAN_MODE_ENABLE": "0"}
    done = processes.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
