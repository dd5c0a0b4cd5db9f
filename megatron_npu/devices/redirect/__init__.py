"""Map ``torch.cuda``, ``"cuda"`` and ``nccl`` to a device other than CUDA.

Megatron refers to CUDA in some 750 lines (core 0.16.1), which are too many to patch, so torch's names are
remapped instead. Three rules keep this safe: only devices of type cuda are mapped; torch's own code gets real
values when it probes the hardware (``callers.py``); ``off`` undoes everything.

Each module in ``_SUBJECTS`` has a function ``replacements(device)``, which yields the owner, name and new
value of every attribute of torch to replace. This function sees the replacements of the previous modules.
"""

from __future__ import annotations

from megatron_npu.base.replaced import Replaced
from megatron_npu.devices.base import Device
from megatron_npu.devices.redirect import (
    autocast,
    collectives,
    device_arguments,
    factories,
    generators,
    loaders,
    namespace,
    tensors,
)

_SUBJECTS = (namespace, factories, tensors, device_arguments, autocast, collectives, generators, loaders)


class Redirection:
    """The redirection of torch's CUDA names to ``device``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._replaced = Replaced()

    def on(self) -> None:
        """Enable the redirection, unless it is enabled already or the device is cuda."""
        if self.device.name == "cuda" or self._replaced:
            return
        try:
            for subject in _SUBJECTS:
                for owner, name, value in subject.replacements(self.device):
                    self._replaced.set(owner, name, value)
        except BaseException:
            self.off()
            raise

    def off(self) -> None:
        """Restore torch's original CUDA names."""
        self._replaced.undo()
