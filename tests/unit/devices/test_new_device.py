"""A device that torch does not know: what `doctor` reports of it, and what it must say about torch.cuda."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices.redirect import Redirection
from megatron_npu.doctor import hardware


class ToyDevice(devices.CpuDevice):
    """Two devices of a vendor's, without any name that only some packages have."""

    name, backend, is_host = "privateuseone", "toyccl", False

    def absence(self) -> str | None:
        return None

    def count(self) -> int:
        return 2


class MuteDevice(ToyDevice):
    """The same, whose author has forgotten torch.cuda."""

    def cuda_namespace(self) -> Mapping[str, Any]:
        return {}


class PartialDevice(ToyDevice):
    """The same, whose author has forgotten one name."""

    def cuda_namespace(self) -> Mapping[str, Any]:
        return {name: value for name, value in super().cuda_namespace().items() if name != "set_device"}


MODULE = types.SimpleNamespace()  # one for all tests, because torch.get_device_module remembers it


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The module of the toy in torch, which has no function."""
    monkeypatch.setattr(torch, "privateuseone", MODULE, raising=False)
    monkeypatch.setattr(devices, "_KINDS", {"privateuseone": ToyDevice, **devices._KINDS})
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "auto")
    return MODULE


def test_doctor_reports_a_device_whose_module_has_no_functions(toy: types.SimpleNamespace) -> None:
    found = hardware.device_list()
    assert found["privateuseone"] == "2 with toyccl"
    assert {"npu", "cuda", "cpu"} <= found.keys()
    assert found["selected"] == "privateuseone"
    assert found["each"] == [
        {"device": "privateuseone:0", "model": "privateuseone"},
        {"device": "privateuseone:1", "model": "privateuseone"},
    ]


def test_doctor_shows_what_the_module_reports(
    toy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "get_device_name", "Toy {}".format, raising=False)
    monkeypatch.setattr(toy, "mem_get_info", lambda index: (index << 20, 8 << 20), raising=False)
    assert hardware.device_list()["each"] == [
        {"device": "privateuseone:0", "model": "Toy 0", "free_mib": 0, "total_mib": 8},
        {"device": "privateuseone:1", "model": "Toy 1", "free_mib": 1, "total_mib": 8},
    ]


@pytest.mark.parametrize(
    ("kind", "lacking"), [(MuteDevice, "current_device, device_count"), (PartialDevice, "lacks set_device. ")]
)
def test_a_device_without_names_of_torch_cuda_is_rejected_before_the_first_call(
    kind: type[devices.Device], lacking: str
) -> None:
    before = torch.cuda.current_device
    with pytest.raises(UsageError, match=rf"{kind.__name__}\.cuda_namespace\(\) must .*{lacking}"):
        Redirection(kind()).on()
    assert torch.cuda.current_device is before
