"""Adaptors of Megatron-LM 285068c8 (January 2023), the tree with ``megatron/model/transformer.py``.

One file per subject. An adaptor only records patches; see ``patching``. What runs unpatched on purpose is in
``unpatched``.
"""

from __future__ import annotations

import importlib
import pkgutil


def register() -> None:
    """Import every module of this folder, which records its patches."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
