"""The device interface of this package."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Owner, name and new value of an attribute of torch that the redirection replaces.
Replacement = tuple[Any, str, Any]


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes on the device of this process: in use, held by its allocator, and the most in use so far."""

    allocated: int
    reserved: int
    peak: int


class Device(ABC):
    """One kind of device: how to find it, seed it and wait for it, and what ``torch.cuda`` means on it.

    Attributes:
        name: ``npu``, ``cuda`` or ``cpu``; also the type of its ``torch.device``.
        backend: the ``torch.distributed`` backend that moves its tensors.
        is_host: whether it is the host itself: device memory is host memory, and the cores that compute also
            read the data.
        simulated: whether it is no hardware: its numbers are right, its times say nothing.
        group_buffers: how large the run wants the buffers of its process groups (``hccl_buffers``).
    """

    name: str
    backend: str
    is_host: bool = False
    simulated: bool = False
    group_buffers: object | None = None

    @property
    def title(self) -> str:
        """The name for users; simulated hardware is marked in it."""
        return f"simulated {self.name}" if self.simulated else self.name

    @abstractmethod
    def absence(self) -> str | None:
        """Return why the device cannot be used here, or None if it can."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of devices of this machine; on the CPU, of processes that share it."""

    @abstractmethod
    def torch_device(self) -> torch.device:
        """Return the device of this process, with its index where the device has one."""

    @abstractmethod
    def set_current(self, index: int) -> None:
        """Make device ``index`` the one of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work has run."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generator that random operations on the device draw from."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the device's generator, a byte tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that ``rng_state`` returned."""

    def host_rng_state(self) -> torch.Tensor:
        """Return the state of the host's own generator (data order, weights initialised on the host)."""
        return torch.get_rng_state()

    def set_host_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that ``host_rng_state`` returned."""
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def host_rng(self) -> Iterator[None]:
        """Use the host's generator for random operations on host tensors in the block.

        A device with memory of its own has its own generator too, so there is nothing to do.
        """
        yield

    def prepare(self) -> None:  # noqa: B027  most devices need nothing
        """Prepare the process for the device; called once, before upstream's first module runs."""

    def release(self) -> None:  # noqa: B027
        """Undo ``prepare``."""

    def clear_overflow(self) -> None:  # noqa: B027
        """Clear the overflow flag of a device that sets one instead of returning inf."""

    def overflowed(self) -> bool:
        """Return whether the overflow flag is set; False on devices that return inf and nan."""
        return False

    @abstractmethod
    def memory(self) -> MemoryStatistics:
        """Return the memory in use, in bytes."""

    @abstractmethod
    def utilization(self) -> float | None:
        """Return the part of the time just past in which the device was busy, by whatever process.

        A number from 0 to 1; None where nothing tells it.
        """

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Restart ``memory().peak`` from what is in use now."""

    def cuda_namespace(self) -> Mapping[str, Any]:
        """Return the replacement of each name in ``torch.cuda``; a dotted name is in a submodule.

        Empty where ``torch.cuda`` already means the device.
        """
        return {}
