"""Show an object with other values under some of its names, without changing the object."""

from __future__ import annotations

from typing import Any


class View:
    """Proxy for a module, class or instance that overrides some of its names.

    Args:
        seen: the object.
        others: the overridden names and their values.
    """

    def __init__(self, seen: Any, **others: Any) -> None:
        self._seen = seen
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)
