"""``megatron-npu doctor`` on this machine, and its advice about machines that are not well."""

from __future__ import annotations

import json

import pytest

from megatron_npu.doctor import command
from tests.end_to_end import tiny

pytest.importorskip("megatron.core")


@pytest.fixture
def healthy() -> dict:
    """A report with nothing to advise."""
    return {
        "versions": {"torch": "2.13.0", "torch-npu": None, "cuda of torch": None},
        "megatron": {"host": "megatron_core", "root": "/x", "failing": []},
        "devices": {"npu": "absent", "cuda": "absent", "cpu": "1 with gloo", "selected": "cpu"},
        "operations": {"failures": {}, "beyond_limit": []},
        "communication": {"all_reduce": "right"},
    }


def test_this_machine_is_well():
    done = tiny.run("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["advice"] == []
    assert done.returncode == 0
    assert report["devices"]["selected"] == "cpu"
    assert report["megatron"]["patches"].keys() == {"same"}
    assert report["operations"]["failures"] == {}
    assert {"attention", "adam", "rotary", "layer_norm"} <= report["operations"]["largest_error"].keys()
    assert report["communication"]["all_reduce"] == "right"


def test_an_absent_device_is_told(monkeypatch):
    with_npu = tiny.environment() | {"MEGATRON_NPU_DEVICE": "npu"}
    monkeypatch.setattr(tiny, "environment", lambda: with_npu)
    done = tiny.run("doctor", "--quick")
    assert done.returncode == 1
    assert "MEGATRON_NPU_DEVICE=npu" in done.stdout.partition("\nadvice\n")[2]


def test_nothing_is_wrong(healthy):
    assert command.advice(healthy) == []
    assert "a run can be expected to work" in command.text(healthy | {"advice": []})


@pytest.mark.parametrize(
    ("part", "content", "told"),
    [
        ("megatron", {"error": "no Megatron on the Python path"}, "no Megatron on the Python path"),
        ("megatron", {"root": "/x", "failing": ["a:b"]}, "megatron-npu check --megatron /x"),
        ("versions", {"torch": "2.13.0", "torch-npu": "2.13.0", "cuda of torch": None}, "set_env.sh"),
        ("versions", {"torch": "2.13.0", "torch-npu": None, "cuda of torch": "12.8"}, "nvidia-smi"),
        ("operations", {"failures": {"norm": "RuntimeError: x"}}, "norm fails: RuntimeError: x"),
        ("operations", {"beyond_limit": ["rotary"]}, "MEGATRON_NPU_VERIFY=rotary"),
        ("operations", {"error": "exit code -11"}, "exit code -11"),
        ("communication", {"error": "rank 0: no end after 180 seconds"}, "GLOO_SOCKET_IFNAME"),
    ],
)
def test_advice(healthy, part, content, told):
    (line,) = command.advice(healthy | {part: content})
    assert told in line
