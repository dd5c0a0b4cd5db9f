"""Store flags and derived values, which become read-only after they are set."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import FrozenInstanceError


class Flags(Namespace):
    """The values of flags by name. ``derive`` sets them; after ``freeze`` they are read-only."""

    __slots__ = ("_is_frozen",)

    def freeze(self) -> None:
        """Make all values read-only."""
        self._is_frozen = True

    def changed(self, **values: object) -> Flags:
        """Return a frozen copy in which some values are changed."""
        result = Flags(**{**vars(self), **values})
        result.freeze()
        return result

    def __setattr__(self, name: str, value: object) -> None:
        self._require_open(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_open(name)
        super().__delattr__(name)

    def _require_open(self, name: str) -> None:
        if getattr(self, "_is_frozen", False):
            raise FrozenInstanceError(
                f"cannot set {name}: the flags are already resolved; set it in pretrain/flags/derive.py, or "
                "make a changed copy with changed()"
            )
