"""Define reference kernels of torch_npu's own operations, and the limits from Ascend's documentation.

One file per family declares the kernels; those for attention are in a folder. ``limits`` contains the
conditions on the arguments of each operation.
"""

from __future__ import annotations

import importlib
import pkgutil


def declare() -> None:
    """Import every module of this package, so that ``registry.KERNELS`` is complete.

    Requires no torch_npu.
    """
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)


def register() -> list[str]:
    """Register every kernel with torch's dispatcher, after torch_npu has been imported.

    Returns:
        The operations that this torch_npu does not define.
    """
    declare()
    from megatron_npu.sim.kernels import registry

    return registry.register_all()
