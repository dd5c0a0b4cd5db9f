"""Run stock Megatron on Ascend NPU, CUDA and CPU, by patching Megatron's modules when they are imported.

Importing the package installs the import hook; it imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_npu.base import early_interrupt

early_interrupt.arm()
from megatron_npu import plugin  # noqa: E402  # takes a moment

if TYPE_CHECKING:
    from megatron_npu.patching.ledger import Ledger

__version__ = "0.1.0"


def install() -> None:
    """Install the import hook and patch modules that are already imported. A second call has no effect.

    Raises:
        UsageError: the device in ``MEGATRON_NPU_DEVICE`` is not available, or an imported Megatron is not
            supported.
    """
    plugin.install()


def installed() -> bool:
    """Return True if the import hook is installed."""
    return plugin.installed()


def uninstall() -> None:
    """Remove the import hook, and restore everything that was changed in Megatron and torch."""
    plugin.uninstall()


def ledger() -> Ledger:
    """Return the ledger, which contains the state of every patch: pending, applied, skipped, drifted or
    failed.
    """
    return plugin.engine().ledger


install()
