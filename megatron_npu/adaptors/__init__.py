"""Replace functions and classes of Megatron with our operations; each upstream has its own folder."""

from __future__ import annotations

import importlib
import pkgutil

_FOLDERS = {
    name: f"deepspeed.{name}" for name in ("megatron_deepspeed", "megatron_deepspeed_core")
}  # the others have their names


def register(upstream: str) -> None:
    """Import all adaptor modules of ``upstream``, which record their patches.

    Raises:
        ModuleNotFoundError: there are no adaptors for that upstream.
    """
    folder = importlib.import_module(f"{__name__}.{_FOLDERS.get(upstream, upstream)}")
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(module.name)
