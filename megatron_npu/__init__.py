"""megatron_npu: stock Megatron on Ascend NPU, CUDA and CPU, by patching at import.

Importing the package arms the import hook; nothing of torch or Megatron is imported by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_npu import plugin

if TYPE_CHECKING:
    from megatron_npu.patching.ledger import Ledger

__version__ = "0.1.0"


def install() -> None:
    """Arm the import hook; patch what is already imported. Calling it again changes nothing.

    Raises:
        UsageError: ``MEGATRON_NPU_DEVICE`` asks for a device that is absent, or the Megatron that is
            already imported is not supported.
    """
    plugin.install()


def installed() -> bool:
    """Return whether the import hook is armed."""
    return plugin.installed()


def uninstall() -> None:
    """Disarm the hook and restore everything that was changed in Megatron and torch."""
    plugin.uninstall()


def ledger() -> Ledger:
    """Return the state of every patch: pending, applied, skipped, drifted or failed."""
    return plugin.engine().ledger


install()
