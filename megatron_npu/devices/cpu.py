"""Implement the CPU as a device, using gloo, a separate random generator, and resident memory as device
memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from megatron_npu.base import malloc, settings
from megatron_npu.devices import cores, cpu_cuda_api, device_monitor, gloo
from megatron_npu.devices.base import Device, MemoryStatistics
from megatron_npu.process import visible_devices

_CPU = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class CpuDevice(Device):
    """The CPU as a device, whose device memory is host memory.

    torch has one generator on a CPU, whereas a GPU run has two: that of the host and that of the device.
    Here, the default generator is the *device's*, which dropout uses. ``host_generator`` is the host's, which
    is used by Megatron's ``torch.get_rng_state``, for weights initialized on the host, and by DataLoaders
    (for seeds, shuffling and the random samples of this process). With a single generator, a DataLoader that
    only the first tensor-parallel rank builds would shift the dropout masks of that rank.

    Attributes:
        index: the result of ``torch.cuda.current_device()``, which distinguishes the processes on a machine.
        host_generator: the host's generator.
        device_generator: the device's generator. Inside ``host_rng``, the two are swapped.
    """

    name = "cpu"
    is_host = True
    backend = "gloo"

    def __init__(self) -> None:
        self.index = 0
        self.device_generator = torch.default_generator
        self.host_generator = torch.Generator()
        self.host_generator.set_state(torch.default_generator.get_state())

    def absence(self) -> str | None:
        return None

    def count(self) -> int:
        """Return the number of simulated CUDA devices, which is the number of processes that share the CPU.

        This is ``MEGATRON_NPU_CPU_DEVICES`` if it is set, restricted by ``CUDA_VISIBLE_DEVICES``; otherwise
        the number of processes that torchrun started; otherwise the number of devices in
        ``CUDA_VISIBLE_DEVICES``.
        """
        total = cast("int | None", settings.CPU_DEVICES.value())
        if total is None and "LOCAL_WORLD_SIZE" in os.environ:
            return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
        visible = visible_devices.listed(visible_devices.CUDA, total)
        return max(1, (total or 1) if visible is None else len(visible))

    def torch_device(self) -> torch.device:
        return _CPU

    def set_current(self, index: int) -> None:
        """Store the index that ``torch.cuda.current_device()`` returns from now on.

        All processes share one CPU.
        """
        self.index = index

    def synchronize(self) -> None:
        """Do nothing, because CPU operations are synchronous."""

    def manual_seed(self, seed: int) -> None:
        # Not torch.manual_seed, which seeds all devices and would call this again.
        self.device_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        return self.device_generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.device_generator.set_state(state)

    def host_rng_state(self) -> torch.Tensor:
        return self.host_generator.get_state()

    def set_host_rng_state(self, state: torch.Tensor) -> None:
        self.host_generator.set_state(state)

    @contextlib.contextmanager
    def host_rng(self) -> Iterator[None]:
        if self.host_generator is torch.default_generator:  # a loader's data set may enter again
            yield
            return
        self._swap_generators()
        try:
            yield
        finally:
            self._swap_generators()

    def _swap_generators(self) -> None:
        """Swap the default random generator and the second one, including their states."""
        device, host = self.device_generator, self.host_generator
        state = device.get_state()
        device.set_state(host.get_state())
        host.set_state(state)
        self.device_generator, self.host_generator = host, device

    def prepare(self) -> None:
        malloc.keep_freed_memory()
        cores.share()

    def release(self) -> None:
        gloo.leave_process()
        cores.give_back()
        malloc.return_freed_memory()

    def memory(self) -> MemoryStatistics:
        """Return the resident set size of this process as allocated and reserved memory, and its peak."""
        resident = psutil.Process().memory_info().rss
        return MemoryStatistics(resident, resident, max(resident, _peak_resident()))

    def utilization(self) -> float:
        """Return the fraction of time in which the machine's processors were busy since the previous call."""
        return device_monitor.utilization() / 100

    def reset_peak_memory(self) -> None:
        """Reset the peak of the resident memory, if the system is Linux.

        On other systems, the peak covers the whole lifetime of the process.
        """
        with contextlib.suppress(OSError):
            # proc(5): resets the high-water mark of this process
            _CLEAR_REFS.write_text("5", encoding="utf-8")

    def cuda_namespace(self) -> Mapping[str, Any]:
        return cpu_cuda_api.namespace(self, lambda: self.index, lambda: self.device_generator)


def _peak_resident() -> int:
    """Return the peak resident set size in bytes, or 0 if the system does not report it."""
    try:
        line = next(
            row for row in _STATUS.read_text(encoding="utf-8").splitlines() if row.startswith("VmHWM:")
        )
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) * 1024
