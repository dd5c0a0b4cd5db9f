"""Adaptors of megatron-core (``megatron.core.*``) and of the training scripts of the same tag.

One module or folder per subject; its docstring says what of upstream it connects. An adaptor only records
patches; see ``patching``.
"""

from __future__ import annotations

import importlib
import pkgutil


def register() -> None:
    """Import every module of this folder; the adaptors among them record their patches."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)
