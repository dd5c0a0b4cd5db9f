"""Replace attributes of torch and Python temporarily."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Replaced:
    """A collection of attributes of modules and classes that have been replaced.

    ``undo`` restores all of them.
    """

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class to another value."""
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_once(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute as ``set`` does, unless another attribute is already replaced."""
        if not self:
            self.set(owner, name, value)

    def undo(self) -> None:
        """Restore all attributes in reverse order of the replacements."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
