"""Adaptors connect a Megatron's symbols to operations: one folder per upstream, and shared parts."""

from __future__ import annotations

import importlib
import pkgutil

_FOLDERS = {
    name: f"deepspeed.{name}" for name in ("megatron_deepspeed", "megatron_deepspeed_core")
}  # the others have their names


def register(upstream: str) -> None:
    """Import every module of the folder of ``upstream``; the adaptors among them record their patches.

    Raises:
        ModuleNotFoundError: there are no adaptors of that name.
    """
    folder = importlib.import_module(f"{__name__}.{_FOLDERS.get(upstream, upstream)}")
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        importlib.import_module(module.name)
