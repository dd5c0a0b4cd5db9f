"""On a cpu the memory of freed tensors is used again, and the C library is left alone when asked."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support import processes

# MiB that stay resident when a tensor of 256 MiB is freed: between prepare and release, and after it.
SCRIPT = """
import psutil
import torch
from megatron_npu.devices import CpuDevice

def resident():
    return psutil.Process().memory_info().rss / 2**20

device = CpuDevice()
before = resident()
device.prepare()
torch.ones(64 * 2**20)
kept = resident() - before
device.release()
torch.ones(64 * 2**20)
print(kept, resident() - before)
"""


def resident_after_free(keep: str) -> list[float]:
    environment = os.environ | {"MEGATRON_NPU_KEEP_MEMORY": keep, "MEGATRON_NPU_AUTOLOAD": "0"}
    environment["PYTHONPATH"] = str(ROOT)  # not sys.path, to which other tests may have added
    result = processes.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return [float(word) for word in result.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose function mallopt(3) is")
class TestMalloc:
    def test_freed_memory_is_used_again_until_released(self) -> None:
        kept, released = resident_after_free(keep="1")
        assert kept > 150
        assert released < 100

    def test_the_c_library_is_left_alone_when_asked(self) -> None:
        untouched, _ = resident_after_free(keep="0")
        assert untouched < 100
