"""Reference kernels of torch_npu's own operations, and the limits of Ascend's documentation.

One file per family declares the kernels; ``limits.py`` says what each operation may be given.
"""

from __future__ import annotations

import importlib
import pkgutil


def register() -> list[str]:
    """Import every module of this package and register what it declares; torch_npu must be imported.

    Returns:
        The declared operations that this torch_npu does not define.
    """
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    from megatron_npu.sim.kernels import registry

    return registry.register_all()
