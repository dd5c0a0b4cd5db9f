"""How busy a device was, and None where nothing tells it."""

from __future__ import annotations

import types

import pytest
import torch

from megatron_npu.devices.cpu import CpuDevice
from megatron_npu.devices.cuda import CudaDevice
from megatron_npu.devices.npu import NpuDevice


def test_a_cpu_is_as_busy_as_the_machine(monkeypatch):
    assert 0 <= CpuDevice().utilization() <= 1
    monkeypatch.setattr("psutil.cpu_percent", lambda: 12.5)
    assert CpuDevice().utilization() == 0.125


def raising(error):
    def utilization():
        raise error

    return utilization


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda: 97, 0.97),
        (raising(ModuleNotFoundError("No module named 'pynvml'")), None),
        (raising(RuntimeError("Driver/library version mismatch")), None),
    ],
)
def test_what_the_driver_says(monkeypatch, found, expected):
    monkeypatch.setattr(torch.cuda, "utilization", found)
    assert CudaDevice().utilization() == expected
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(utilization=found), raising=False)
    monkeypatch.delenv("MEGATRON_NPU_SIM", raising=False)
    assert NpuDevice().utilization() == expected
