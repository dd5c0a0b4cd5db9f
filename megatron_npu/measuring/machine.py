"""Describe the machine on which a table is measured, and what limits its measurements."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_npu import devices
from megatron_npu.devices import cores

_BF16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # as /proc/cpuinfo names them on x86-64 and on Arm
_FP16 = {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"}
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """A description of this machine's device for a benchmark.

    Attributes:
        device: the title of the device, such as ``cpu`` or ``simulated npu``.
        kind: ``cpu``, ``cuda`` or ``npu``.
        count: the number of devices, or None on a CPU.
        host_memory: whether device memory is host memory (a CPU, a simulated device).
        simulated: whether timings are meaningless.
        is_host: whether ranks are processes on the CPU.
        cores: the number of CPU cores.
        features: the instruction set of the CPU.
        load: the load average of the last minute.
    """

    device: str
    kind: str
    count: int | None
    host_memory: bool
    simulated: bool
    is_host: bool
    cores: int
    features: frozenset[str]
    load: float = 0.0

    @classmethod
    def here(cls) -> Machine:
        """Return a description of this machine."""
        device = devices.current()
        return cls(
            device=device.title,
            kind=device.name,
            count=None if device.is_host else device.count(),
            host_memory=device.is_host or device.simulated,
            simulated=device.simulated,
            is_host=device.is_host,
            cores=os.cpu_count() or 1,
            features=_features(_CPUINFO),
            load=os.getloadavg()[0],
        )

    def lacks(self, dtype: str) -> bool:
        """Return True if the CPU has no instructions for matmuls in ``bf16`` or ``fp16``."""
        return self.is_host and not self.features & (_BF16 if dtype == "bf16" else _FP16)

    def notes(self, ranks: int, dtype: str) -> list[str]:
        """Return notes that help readers to interpret the table.

        Args:
            ranks: the number of processes per row.
            dtype: the dtype of mixed precision.
        """
        notes = [self._memory()]
        if self.simulated:
            notes.append("A simulated NPU is not hardware: its times mean nothing and are omitted.")
        elif self.is_host:
            notes += self._cores(ranks)
            if self.load > self.cores / 2:
                notes.append(
                    f"Other programs were running: the load was {self.load:.1f} on {self.cores} cores at "
                    "the start. This lowers throughput and makes its ratios noisy; CPU time is less "
                    "affected."
                )
            if self.lacks(dtype):
                notes.append(
                    f"This processor emulates {dtype}, for which it has no instructions: mixed precision is "
                    "slower here, which says nothing about devices that do have them."
                )
        return notes

    def _memory(self) -> str:
        if self.is_host:
            return (
                "Peak memory: growth of the resident set of the largest rank beyond Python and its "
                "packages (VmHWM), in MB of 2^20 bytes, from the first step on."
            )
        return (
            "Peak memory: maximum memory of tensors in the device's allocator on the largest rank, in "
            f"MB of 2^20 bytes, from the first step on.{' It is exact.' if self.simulated else ''}"
        )

    def _cores(self, ranks: int) -> list[str]:
        if ranks == 1:
            return []
        each = cores.threads(ranks)
        return [
            (
                f"{ranks} ranks share {self.cores} cores, with {each} thread{'s' * (each > 1)} each "
                "(unless OMP_NUM_THREADS is set), and one memory: the speed-up of several devices cannot "
                "be seen."
            )
        ]


def _features(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((row for row in lines if row.lower().startswith(("flags", "features"))), "")
    return frozenset(line.partition(":")[2].split())
