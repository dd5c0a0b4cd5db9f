"""Settings: a name or a value that would do nothing is refused before anything runs."""

from __future__ import annotations

import os
import sys

import pytest

from megatron_npu.base import settings
from megatron_npu.base.arg_parser import Unfit, byte_size
from megatron_npu.base.errors import UsageError
from tests.support import processes, tiny


def test_settings_in_force_are_accepted(monkeypatch):
    monkeypatch.setenv(settings.STRICT.name, "1")
    monkeypatch.setenv(settings.DEVICE.name, "")  # an empty one counts as unset
    settings.check()
    assert settings.STRICT.enabled()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MEGATRON_NPU_VERFIY", "all", "Use MEGATRON_NPU_VERIFY, or unset"),
        ("MEGATRON_NPU_STRICT", "yes", "MEGATRON_NPU_STRICT must be 0 or 1, but got yes."),
        ("MEGATRON_NPU_DEVICE", "gpu", "must be auto, npu, cuda or cpu, but got gpu."),
        ("MEGATRON_NPU_SIM_HCCL_TIMEOUT", "abc", "TIMEOUT must be a positive integer, but got abc."),
        ("MEGATRON_NPU_SIM_DEVICES", "65", "DEVICES must be an integer from 1 to 64, but got 65."),
        (
            "MEGATRON_NPU_SIM_MEMORY",
            "much",
            "must be a positive number of bytes, optionally with the suffix K, M or G, but got much.",
        ),
        ("MEGATRON_NPU_SIM_SOC", "Ascend910B9", "SOC must be Ascend910B"),
        ("RANK", "abc", "RANK must be a non-negative integer, but got 'abc'. Unset it"),
        ("LOCAL_RANK", "", "LOCAL_RANK must be a non-negative integer, but got ''"),
        ("WORLD_SIZE", "-1", "WORLD_SIZE must be a non-negative integer, but got '-1'"),
        ("MEGATRON_NPU_SIM_SOC", "H200", "SOC must be Ascend310B1, "),
    ],
)
def test_what_would_do_nothing_is_refused(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error:
        settings.check()
    assert told in str(error.value)


def test_every_variable_is_listed_once():
    declared = [value for value in vars(settings).values() if isinstance(value, settings.Variable)]
    assert declared == settings.VARIABLES
    assert len({variable.name for variable in declared}) == len(declared)


@pytest.mark.parametrize("start", [tiny.command("ledger"), [sys.executable, "-c", "import megatron.core"]])
def test_a_misspelt_variable_stops_every_way_in(start):
    pytest.importorskip("megatron.core")
    environment = {**os.environ, **tiny.environment(), "MEGATRON_NPU_DEVISE": "cpu"}
    if "-c" in start:
        start = [*start[:2], f"import megatron_npu; {start[2]}"]
    done = processes.run(start, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(told) == 1
    assert "unknown setting MEGATRON_NPU_DEVISE. Use MEGATRON_NPU_DEVICE, or unset" in told[0]
    assert "Traceback" not in done.stderr


def test_a_value_is_what_the_simulator_is_told(monkeypatch):
    from megatron_npu.sim.settings import simulator_values

    monkeypatch.setenv("MEGATRON_NPU_SIM_MEMORY", "2gb")
    monkeypatch.setenv("MEGATRON_NPU_SIM_DEVICES", "64")
    told = simulator_values()
    assert (told["memory"], told["devices"], told["soc"]) == (str(2 << 30), "64", settings.SIM_SOC.default)


@pytest.mark.parametrize("text", ["", "0", "K", "4KM", "-1G", "1.5G", "4T"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(Unfit, match="optionally with the suffix K, M or G"):
        byte_size(text)
