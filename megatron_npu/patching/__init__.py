"""The patch engine: records of patches, the import hook that applies them, the ledger, the pins.

It knows nothing of the host that it patches and imports nothing else of this project.
"""

from megatron_npu.patching.record import (
    ALL_DEVICES,
    Patch,
    PatchConflict,
    Registry,
    constant,
    registry,
    replace,
    wrap,
)

__all__ = ["ALL_DEVICES", "Patch", "PatchConflict", "Registry", "constant", "registry", "replace", "wrap"]
