"""Define the interface that every device of this package implements."""

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
    """Memory statistics of this process's device in bytes: in use, reserved by the allocator, and the
    peak.
    """

    allocated: int
    reserved: int
    peak: int


class Device(ABC):
    """Interface of a device type, which detects, seeds and synchronizes the device and maps ``torch.cuda`` to
    it.

    Attributes:
        name: ``npu``, ``cuda`` or ``cpu``, which is also its type in ``torch.device``.
        backend: the ``torch.distributed`` backend for tensors on the device.
        is_host: whether the device is the host: device memory is host memory, and the same cores compute and
            load data.
        simulated: whether the device is simulated: values are correct, but timings are meaningless.
        group_buffers: the buffer sizes of process groups that the run selected (``hccl_buffers``).
    """

    name: str
    backend: str
    is_host: bool = False
    simulated: bool = False
    group_buffers: object | None = None

    @property
    def title(self) -> str:
        """The name of the device that is shown to users.

        It marks simulated hardware.
        """
        return f"simulated {self.name}" if self.simulated else self.name

    @abstractmethod
    def absence(self) -> str | None:
        """Return the reason why the device is not available, or None if it is available."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of devices on this machine.

        For a CPU, this is the number of processes that share it.
        """

    @abstractmethod
    def torch_device(self) -> torch.device:
        """Return this process's device as a ``torch.device``, which has an index if the device type has
        indices.
        """

    @abstractmethod
    def set_current(self, index: int) -> None:
        """Make the device with the number ``index`` the current device of this process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generator that is used for random operations on the device."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the device's generator as a byte tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that was returned by ``rng_state``."""

    def why_not_restored(self, state: torch.Tensor) -> str | None:
        """Return the reason why a checkpoint's generator state cannot be restored on this device, or None.

        The state of a CPU generator (mt19937) has 5,056 bytes, and that of an NPU or GPU generator (Philox)
        has 16.
        """
        saved, own = state.numel(), self.rng_state().numel()
        if saved == own:
            return None
        return (
            "the device's random generators start from --seed, because the checkpoint was saved on "
            f"another type of device ({saved} bytes of generator state there, {own} here); the host's "
            "generators are restored"
        )

    def host_rng_state(self) -> torch.Tensor:
        """Return the state of the host's generator, which determines the data order and weights
        initialized on the host.
        """
        return torch.get_rng_state()

    def set_host_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that was returned by ``host_rng_state``."""
        torch.set_rng_state(state)

    @contextlib.contextmanager
    def host_rng(self) -> Iterator[None]:
        """Use the host's generator for random operations on host tensors inside the ``with`` block.

        Devices with their own memory also have their own generator, so this has no effect for them.
        """
        yield

    def prepare(self) -> None:  # noqa: B027  most devices need nothing
        """Prepare this process for using the device.

        This is called once, before the first upstream module is executed.
        """

    def release(self) -> None:  # noqa: B027
        """Undo ``prepare``."""

    def clear_overflow(self) -> None:  # noqa: B027
        """Clear the overflow flag on devices that set a flag instead of returning inf."""

    def overflowed(self) -> bool:
        """Return True if the overflow flag of the device is set.

        Devices that return inf and nan always return False.
        """
        return False

    @abstractmethod
    def memory(self) -> MemoryStatistics:
        """Return the device memory, in bytes, that is in use, that is reserved, and that was in use at
        the peak.
        """

    @abstractmethod
    def utilization(self) -> float | None:
        """Return the fraction of recent time, from 0 to 1, in which any process kept the device busy.

        The result is None if this is unknown.
        """

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset the peak in the memory statistics to the amount of memory that is currently in use."""

    def cuda_namespace(self) -> Mapping[str, Any]:
        """Return the replacements for names in ``torch.cuda``.

        A name with a dot refers to a submodule.

        The result is empty if ``torch.cuda`` is already the device's own module.
        """
        return {}
