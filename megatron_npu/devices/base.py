"""What the plug-in asks of a device, whichever one it is."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes in use on the device of this process: now, held by its allocator, and at most so far."""

    allocated: int
    reserved: int
    peak: int


class Device(ABC):
    """One kind of device: how to find it, seed it, wait for it and what ``torch.cuda`` means on it.

    Attributes:
        name: ``npu``, ``cuda`` or ``cpu``; also the type of its ``torch.device``.
        backend: the ``torch.distributed`` backend that moves its tensors.
        is_host: whether it is the host itself: its memory, and its cores, which reading data needs too.
    """

    name: str
    backend: str
    is_host: bool = False

    @abstractmethod
    def absence(self) -> str | None:
        """Return why the device cannot be used here, or None if it can."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of devices that the processes of this machine can spread over."""

    @abstractmethod
    def torch_device(self) -> torch.device:
        """Return the device of this process, with its index where the device has one."""

    @abstractmethod
    def set_current(self, index: int) -> None:
        """Make device ``index`` the one of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was queued has run."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generator that random operations on the device draw from."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the device's generator, a byte tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put a state of ``rng_state`` back."""

    def host_rng_state(self) -> torch.Tensor:
        """Return the state of the host's own generator (data order, weights initialised on the host)."""
        return torch.get_rng_state()

    def set_host_rng_state(self, state: torch.Tensor) -> None:
        """Put a state of ``host_rng_state`` back."""
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def host_rng(self) -> Iterator[None]:
        """Let random operations on host tensors draw from the host's generator inside the block.

        A device with memory of its own has two generators anyway, so nothing is to be done.
        """
        yield

    def prepare(self) -> None:  # noqa: B027  most devices need nothing
        """Make the process ready to run on the device; called once, before upstream's first module runs."""

    def release(self) -> None:  # noqa: B027
        """Take back what ``prepare`` changed."""

    def clear_overflow(self) -> None:  # noqa: B027
        """Forget overflows so far, on a device that keeps a flag of them instead of returning inf."""

    def overflowed(self) -> bool:
        """Return whether that flag is set; False on devices whose results are inf or nan themselves."""
        return False

    @abstractmethod
    def memory(self) -> MemoryStatistics:
        """Return the memory in use, in bytes."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Let ``memory().peak`` start again from what is in use now."""

    def cuda_namespace(self) -> Mapping[str, Any]:
        """Return what each name of ``torch.cuda`` stands for here; a dotted name reaches a submodule.

        Empty on the device that ``torch.cuda`` already means.
        """
        return {}
