"""Patch upstream modules when they are imported: patch records, the import hook, the ledger and the pins.

This package does not depend on the patched Megatron, and imports nothing else from this project.
"""

from megatron_npu.patching.patch import ALL_DEVICES, Patch
from megatron_npu.patching.registry import (
    PatchConflict,
    Registry,
    around,
    constant,
    registry,
    replace,
    watch,
    wrap,
)

__all__ = [
    "ALL_DEVICES",
    "Patch",
    "PatchConflict",
    "Registry",
    "around",
    "constant",
    "registry",
    "replace",
    "watch",
    "wrap",
]
