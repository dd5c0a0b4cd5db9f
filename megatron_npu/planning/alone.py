"""Collectives of Python objects for one process that stands for all ranks: everybody has what it has."""

from __future__ import annotations

from typing import Any


def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
    """Fill ``objects`` with this process's own."""
    objects[:] = [mine] * len(objects)


def gather_object(mine: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Fill ``objects``, of the rank that gathers, with this process's own."""
    if objects is not None:
        objects[:] = [mine] * len(objects)


def nothing(*_: Any, **__: Any) -> None:
    """Leave the objects as they are: a broadcast, a barrier."""
