"""Check whether a package is installed, and where, without importing it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec


def spec_of(name: str) -> ModuleSpec | None:
    """Return the import spec of an installed package or module, or None if it is not installed.

    A module that a program created itself, as in ``sys.modules["flash_attn"] = ModuleType("flash_attn")``,
    counts as not installed: it has no spec, and ``find_spec`` raises a ValueError for it.
    """
    try:
        return importlib.util.find_spec(name)
    except ValueError:
        return None


def is_installed(name: str) -> bool:
    """Return True if a package or module is installed; see ``spec_of``."""
    return spec_of(name) is not None
