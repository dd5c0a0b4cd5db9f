"""List the peak performance of devices according to their data sheets, for estimates of time only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A kind of device with its peak performance.

    Attributes:
        flops: the number of dense bf16 operations per second.
        memory: the memory bandwidth of the device in bytes per second.
        link: bytes per second and direction from one device to the other devices on its machine.
        network: bytes per second and direction from one device to other machines.
    """

    flops: float
    memory: float
    link: float
    network: float


HARDWARE = {
    "ascend-910b": Hardware(313e12, 1.6e12, 196e9, 25e9),
    "a100": Hardware(312e12, 2.0e12, 300e9, 25e9),
    "h100": Hardware(989e12, 3.35e12, 450e9, 50e9),
    "h200": Hardware(989e12, 4.8e12, 450e9, 50e9),
}
# what programs reach of a sheet's numbers: usual shares, measured nowhere here
REACHED_FLOPS, REACHED_MEMORY, REACHED_LINKS = 0.6, 0.7, 0.7


def default_of(device: str) -> str:
    """Return the hardware that is assumed for ``npu`` or ``cuda`` by default."""
    return "ascend-910b" if device == "npu" else "h100"
