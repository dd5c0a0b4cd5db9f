"""Measure the step times and the peak memory of a rank."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from megatron_npu import devices
from megatron_npu.base import malloc
from megatron_npu.measuring.job import WARM_UP, Job

_STATUS = Path("/proc/self/status")
_STACKS = 512 << 20  # of threads, 8 MB each, which are mapped and hardly used
_LOOK = 0.05  # seconds between two looks at the resident set


@dataclass
class Meter:
    """Measures the step times and the memory of one rank.

    On NPU and CUDA, the memory is the peak of the device's allocator. On a CPU, it is the peak of the
    resident set minus its size before the model was built, so Python and its packages do not count. The peak
    is measured from the end of the first step on, when all states exist, so building the model does not
    count.

    Attributes:
        seconds, processor: wall time, and CPU time of all threads of this rank, for each repetition.

    Args:
        job: the row's job.
        steps: a file that grows by one byte per step, which the parent reads. If None, it is not written.
        exceeded: called in another thread, with the reason, if a rank on a CPU exceeds its limit.
    """

    job: Job
    steps: Path | None = None
    exceeded: Callable[[str], None] | None = None
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    _done: int = 0
    _mark: float = 0.0
    _processor_mark: float = 0.0
    _before: int = 0

    def start(self) -> None:
        """Record the memory use before the model is built, and set the memory limit."""
        device = devices.current()
        if device.is_host:
            malloc.trim()
            self._before = device.memory().allocated
        if self.job.memory_limit is not None:
            _limit(self.job.memory_limit)
            if device.is_host:
                threading.Thread(target=self._watch, args=(self.job.memory_limit,), daemon=True).start()

    def _watch(self, limit: int) -> None:
        """Poll the resident set size of the process until it exceeds ``limit``."""
        while self._grown() <= limit:
            time.sleep(_LOOK)
        if self.exceeded is not None:
            self.exceeded(f"a rank exceeded its memory limit of {limit >> 20} MB")

    def _grown(self) -> int:
        return devices.current().memory().allocated - self._before

    def step(self) -> None:
        """Record the end of a step.

        Call this at the same place in each step.
        """
        self._done += 1
        device = devices.current()
        if self._done == 1:
            if device.is_host:
                malloc.trim()
            device.reset_peak_memory()
        beyond = self._done - WARM_UP
        if beyond >= 0 and beyond % self.job.steps == 0:
            self._lap(first=beyond == 0)
        if self.steps is not None:
            with open(self.steps, "ab") as stream:
                stream.write(b".")

    def _lap(self, first: bool) -> None:
        devices.current().synchronize()
        now, processor = time.perf_counter(), time.process_time()
        if not first:
            self.seconds.append(now - self._mark)
            self.processor.append(processor - self._processor_mark)
        self._mark, self._processor_mark = now, processor

    def peak(self) -> int:
        """Return the peak memory of the rank in bytes."""
        return max(0, devices.current().memory().peak - self._before)


def _limit(limit: int) -> None:
    """Limit the memory growth of this process to ``limit`` bytes with RLIMIT_DATA (CPU) or torch's allocator.

    RLIMIT_DATA counts all writable mappings, including the stacks of threads, which explains the allowance.
    """
    device = devices.current()
    if device.is_host:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = _data() + limit + _STACKS
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return
    module = torch.get_device_module(device.name)
    total = module.mem_get_info()[1]
    module.set_per_process_memory_fraction(min(1.0, limit / total))


def lift_limit() -> None:
    """Remove the memory limit from this process, so that it can report its result."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data() -> int:
    """Return how many bytes of this process's memory count towards RLIMIT_DATA."""
    try:
        line = next(
            row for row in _STATUS.read_text(encoding="utf-8").splitlines() if row.startswith("VmData:")
        )
    except (OSError, StopIteration):
        return psutil.Process(os.getpid()).memory_info().vms
    return int(line.split()[1]) * 1024
