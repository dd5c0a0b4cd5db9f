"""CUDA_VISIBLE_DEVICES: which devices it lists, and what it means for NPUs and a CPU."""

from __future__ import annotations

import pytest

from megatron_npu.base import settings
from megatron_npu.devices import CpuDevice
from megatron_npu.process import visible_devices
from megatron_npu.sim.settings import simulator_values


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (visible_devices.CUDA, visible_devices.ASCEND, settings.CPU_DEVICES.name, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "total", "found"),
    [
        ("0,2", 4, [0, 2]),
        (" 2, 0 ", 4, [2, 0]),
        ("0,4,1", 4, [0]),
        ("0,-1,1", 4, [0]),
        ("1,1", 4, [1]),
        ("GPU-8932f937", None, []),
        ("0,2", None, [0, 2]),
        ("", 4, None),
        (" ", 4, None),
    ],
)
def test_what_is_listed(monkeypatch: pytest.MonkeyPatch, text: str, total: int | None, found: object) -> None:
    monkeypatch.setenv(visible_devices.CUDA, text)
    assert visible_devices.listed(visible_devices.CUDA, total) == found


def test_npus_are_chosen_by_cann_s_name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    visible_devices.name_for_ascend()
    assert visible_devices.listed(visible_devices.ASCEND) is None
    monkeypatch.setenv(visible_devices.CUDA, "1,3")
    visible_devices.name_for_ascend()
    assert visible_devices.listed(visible_devices.ASCEND) == [1, 3]
    monkeypatch.setenv(visible_devices.CUDA, "0")
    visible_devices.name_for_ascend()
    assert visible_devices.listed(visible_devices.ASCEND) == [1, 3]


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 1),
        ({"MEGATRON_NPU_CPU_DEVICES": "3"}, 3),
        ({"MEGATRON_NPU_CPU_DEVICES": "3", "LOCAL_WORLD_SIZE": "2"}, 3),
        ({"MEGATRON_NPU_CPU_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"MEGATRON_NPU_CPU_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,2"}, 1),
    ],
)
def test_as_how_many_devices_a_cpu_counts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert CpuDevice().count() == count


def test_the_simulator_has_the_npus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SIM_DEVICES.name, "4")
    assert simulator_values()["devices"] == "4"
    monkeypatch.setenv(visible_devices.ASCEND, "1,3")
    assert simulator_values()["devices"] == "2"
