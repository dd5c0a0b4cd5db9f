"""On a cpu the memory of freed tensors is used again, and the C library is left alone when asked."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Page faults of ten more tensors of 64 MiB, each written and freed, after the first two.
SCRIPT = """
import resource
import torch
from megatron_npu.devices import CpuDevice

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(16 * 1024 * 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

device = CpuDevice()
device.prepare()
faults(2)
kept = faults(10)
device.release()
faults(1)
print(kept, faults(10))
"""


def page_faults(keep: str) -> list[int]:
    environment = os.environ | {"MEGATRON_NPU_KEEP_MEMORY": keep, "MEGATRON_NPU_AUTOLOAD": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return [int(word) for word in result.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt(3) is glibc's")
class TestHeap:
    def test_freed_memory_is_used_again_until_released(self) -> None:
        kept, released = page_faults(keep="1")
        # 640 MiB are 163,840 pages of 4 KiB, or at the very least 320 of 2 MiB
        assert kept < 100
        assert released >= 320

    def test_the_c_library_is_left_alone_when_asked(self) -> None:
        untouched, _ = page_faults(keep="0")
        assert untouched >= 320
