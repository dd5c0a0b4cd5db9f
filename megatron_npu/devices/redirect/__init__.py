"""Map ``torch.cuda``, ``"cuda"`` and ``nccl`` to a device that is not CUDA.

Megatron names CUDA in some 750 lines (core 0.16.1), so patching each is hopeless; torch itself is told
once what is meant. Three rules keep the lie small: only devices of type cuda are mapped; torch's own
frames see the truth where they probe for hardware (``callers.py``); everything is undone by ``off``.

Each module in ``_SUBJECTS`` has a function ``replacements(device)``, which yields owner, name and new value
of every attribute of torch that it replaces. It sees what the modules before it have replaced.
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
    """Gives torch's CUDA names the meaning of ``device``; ``off`` restores each of them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._replaced = Replaced()

    def on(self) -> None:
        """Switch the redirection on; on the cuda device, and when it is on already, nothing changes."""
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
        """Put everything back."""
        self._replaced.undo()
