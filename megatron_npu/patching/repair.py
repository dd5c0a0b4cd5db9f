"""Rebind names that other modules imported with ``from module import f`` before the patch was applied.

This is required for circular imports, in which a sibling module is executed before ``module`` has finished,
and if upstream was imported before the plug-in. Such names are found by object identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_npu.patching.attribute_patch import Change

MAIN_MODULES = ("__main__", "__mp_main__")  # the second is the main module in a spawned child


@dataclass(frozen=True)
class Offer:
    """A patched object that other modules may later import by value.

    Attributes:
        name: the name under which they import it.
        new: the object.
        old: the object that is restored on undo.
    """

    name: str
    new: Any
    old: Any


def find_repairs(
    module: ModuleType, made: Iterable[Change], slots: Set[tuple[int, str]], covers: Callable[[str], bool]
) -> tuple[list[Change], list[Offer]]:
    """Find the modules that have imported unpatched objects of ``module`` by value.

    Also return the patched objects that modules may import later.

    Args:
        made: the changes made by patching ``module``.
        slots: all patched slots (see ``ChangeLog.slots``).
        covers: returns whether a module with the given name belongs to upstream.

    Returns:
        The changes that rebind the names, and the new objects to take back on undo. The latter exclude new
        objects that are defined in upstream itself, because a module may refer to these for another reason.
    """
    changes = list(made)
    own = [change for change in changes if change.owner is module]
    olds = {id(change.old): change for change in own if is_shared_by_identity(change.old, module.__name__)}
    news = {id(change.new) for change in own if callable(change.new)}
    repairs: dict[tuple[int, str], Change] = {}  # by slot: one module may go by two names
    for holder, name, value in holders(news | olds.keys(), covers):
        change = olds.get(id(value))
        if change is not None:
            repairs[id(holder), name] = Change(module, change.qualname, holder, name, value, change.new)
        elif (id(holder), name) not in slots:
            news.discard(id(value))
    offers = [Offer(change.name, change.new, change.old) for change in changes if id(change.new) in news]
    return list(repairs.values()), offers


def take_back(offers: Iterable[Offer], covers: Callable[[str], bool]) -> None:
    """Restore the original objects in modules that have imported the patched objects by value."""
    originals: dict[int, dict[str, Any]] = {}
    for offer in offers:
        originals.setdefault(id(offer.new), {}).setdefault(offer.name, offer.old)
    for holder, name, value in holders(originals.keys(), covers):
        named = originals[id(value)]  # one new object may stand for several: the name tells which
        setattr(holder, name, named.get(name, next(iter(named.values()))))


def is_shared_by_identity(value: Any, module: str) -> bool:
    """Return True if all other modules that refer to ``value`` have obtained it from ``module``.

    This is the case for functions and classes that ``module`` itself defines. It is not for plain values,
    which may be equal by chance, and for objects that ``module`` imported, which other modules may have
    imported from their origin.
    """
    return callable(value) and getattr(value, "__module__", None) == module


def holders(values: Set[int], covers: Callable[[str], bool]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield (module, name, value) for each reference to one of the given objects in upstream and in the main
    module.
    """
    # copy() is atomic, list(….items()) is not: other threads import in the meantime
    for module_name, module in sys.modules.copy().items():
        if not isinstance(module, ModuleType):
            continue
        if not (module_name in MAIN_MODULES or covers(module_name)):
            continue
        names = vars(module).copy()
        if values.isdisjoint(map(id, names.values())):  # almost always; much faster than the loop below
            continue
        yield from ((module, name, value) for name, value in names.items() if id(value) in values)
