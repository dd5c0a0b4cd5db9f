"""Reference kernels of torch_npu's own operations: every module of this package declares some."""

from __future__ import annotations

import importlib
import pkgutil


def register() -> None:
    """Import every module of this package and register what it declares; torch_npu must be imported."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    from megatron_npu.sim.kernels import registry

    registry.register_all()
