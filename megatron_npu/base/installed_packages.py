"""Find out whether and where a package is installed, without importing it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of an installed package or module; None if there is none.

    A module that a program has made itself, as in ``sys.modules["flash_attn"] = ModuleType("flash_attn")``,
    is not installed. Python has no spec to show for it, and raises a ValueError where one asks.
    """
    try:
        return importlib.util.find_spec(name)
    except ValueError:
        return None


def is_installed(name: str) -> bool:
    """Return whether a package or module is installed (see ``spec_of``)."""
    return spec_of(name) is not None
