"""Settings: a name or a value that would do nothing is refused before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_npu import settings
from megatron_npu.errors import UsageError
from tests.end_to_end import tiny


def test_settings_in_force_are_accepted(monkeypatch):
    monkeypatch.setenv(settings.STRICT.name, "1")
    monkeypatch.setenv(settings.DEVICE.name, "")  # an empty one counts as unset
    settings.check()
    assert settings.STRICT.enabled()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MEGATRON_NPU_VERFIY", "all", "expected MEGATRON_NPU_VERIFY."),
        ("MEGATRON_NPU_STRICT", "yes", "MEGATRON_NPU_STRICT=yes; expected 0 or 1."),
        ("MEGATRON_NPU_DEVICE", "gpu", "expected auto or npu or cuda or cpu."),
        ("MEGATRON_NPU_SIM_HCCL_TIMEOUT", "abc", "TIMEOUT=abc; expected a whole number from 1 on."),
        ("MEGATRON_NPU_SIM_DEVICES", "65", "DEVICES=65; expected a whole number from 1 to 64."),
        ("MEGATRON_NPU_SIM_MEMORY", "much", "expected bytes, or a number with K, M or G."),
        ("MEGATRON_NPU_SIM_SOC", "Ascend910B9", "SOC=Ascend910B9; expected Ascend910B"),
        ("MEGATRON_NPU_SIM_SOC", "H200", "SOC=H200; expected Ascend310B1 or "),
    ],
)
def test_what_would_do_nothing_is_refused(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error:
        settings.check()
    assert told in str(error.value)


def test_every_variable_is_listed_once():
    declared = [value for value in vars(settings).values() if isinstance(value, settings.Variable)]
    assert list(settings.VARIABLES) == declared
    assert len({variable.name for variable in declared}) == len(declared)


@pytest.mark.parametrize("start", [tiny.command("ledger"), [sys.executable, "-c", "import megatron.core"]])
def test_a_misspelt_variable_stops_every_way_in(start):
    pytest.importorskip("megatron.core")
    environment = {**os.environ, **tiny.environment(), "MEGATRON_NPU_DEVISE": "cpu"}
    if "-c" in start:
        start = [*start[:2], f"import megatron_npu; {start[2]}"]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "MEGATRON_NPU_DEVISE, which is no setting; expected MEGATRON_NPU_DEVICE." in done.stderr
