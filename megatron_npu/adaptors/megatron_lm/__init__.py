"""Adaptors of Megatron-LM 285068c8 (January 2023), the tree with ``megatron/model/transformer.py``.

One file per upstream module, called after it as in the README's list of replaced functions. An adaptor
only records patches; see ``patching``.
"""

from __future__ import annotations

import importlib
import pkgutil


def register() -> None:
    """Import every adaptor of this folder, which records its patches."""
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("adaptor_"):
            importlib.import_module(f"{__name__}.{module.name}")
