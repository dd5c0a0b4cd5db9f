"""Replace an attribute of a module or class, and restore its old value on request."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from megatron_npu.patching.patch import Patch

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()


@dataclass
class Change:
    """A replaced attribute ``owner.name``, with its previous and its new raw value.

    Attributes:
        module, qualname: the patched symbol for which the value was set.
    """

    module: ModuleType
    qualname: str
    owner: Any
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    @property
    def target(self) -> str:
        """The patched symbol in the form ``package.module:Qual.name``."""
        return f"{self.module.__name__}:{self.qualname}"

    def make(self) -> None:
        """Set the attribute to the new value."""
        setattr(self.owner, self.name, self.new)

    def undo(self) -> bool:
        """Restore the old value, unless other code has changed the attribute since.

        Return True if it was restored.
        """
        if vars(self.owner).get(self.name, MISSING) is not self.new:
            return False
        if self.old is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)
        return True


class ChangeLog:
    """The attribute changes that are in effect, in the order in which they were made.

    This class is thread-safe.
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock with a new one after a fork.

        The thread that held the old lock does not exist in the child process.
        """
        # Held while a change is made and noted, or undone and forgotten: the list keeps their order. It comes
        # after every import lock: a thread patches with the lock of its module held, but what is done under
        # this one imports nothing, so its holder waits for no other thread.
        self._lock = threading.RLock()

    def make(self, change: Change) -> None:
        """Make ``change``, and record it."""
        with self._lock:
            change.make()
            self._changes.append(change)

    def undo(self, changes: Iterable[Change]) -> list[Change]:
        """Undo ``changes`` in reverse order, and remove them from the log.

        Return the changes that other code has overwritten.
        """
        with self._lock:
            changes = list(changes)
            refused = [change for change in reversed(changes) if not change.undo()]
            gone = set(map(id, changes))
            self._changes = [change for change in self._changes if id(change) not in gone]
        return refused

    def all(self) -> list[Change]:
        """Return all changes in the order in which they were made."""
        return self._changes.copy()

    def slots(self) -> set[tuple[int, str]]:
        """Return the pair (id of the owner, name) for every changed attribute."""
        return {(id(change.owner), change.name) for change in self.all()}


@dataclass(frozen=True)
class Slot:
    """The place where a symbol is stored: its owner and its name.

    Attributes:
        owner: the module or class.
        name: the last component of the qualified name.
        own: the raw value in the owner's own dictionary (an unbound descriptor), or MISSING.
        current: the raw value in effect, which may be inherited.
    """

    owner: Any
    name: str
    own: Any
    current: Any


def find_slot(module: ModuleType, qualname: str) -> Slot | None:
    """Return the slot of ``qualname`` in ``module``, or None if it does not exist."""
    *path, name = qualname.split(".")
    owner: Any = module
    for part in path:
        owner = _raw(owner, part)
        if not isinstance(owner, type):
            return None
    current = _raw(owner, name)
    if current is MISSING:
        return None
    return Slot(owner, name, vars(owner).get(name, MISSING), current)


def _raw(owner: Any, name: str) -> Any:
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, MISSING)
    return inspect.getattr_static(owner, name, MISSING)


def new_value(patch: Patch, current: Any) -> Any:
    """Return the value that replaces ``current`` when ``patch`` is applied.

    Both are raw values, as stored in the owner's dictionary.
    """
    if patch.kind == "constant":
        return patch.make
    if patch.kind == "replace":
        return _like(current, patch.make)
    original = bare(current)
    make = _call_around if patch.kind == "around" else _made
    return _like(current, make(original, patch.make))


def bare(raw: Any) -> Any:
    """Return the function inside a static method, class method or property, and return any other value
    unchanged.

    Other values are returned unchanged.
    """
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def _like(raw: Any, value: Any) -> Any:
    """Return ``value`` in the same kind of descriptor as ``raw``."""
    if isinstance(value, (staticmethod, classmethod, property)):
        return value
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(value)
    return raw.getter(value) if isinstance(raw, property) else value


def _call_around(original: Any, function: Any) -> Any:
    """Return a function that calls ``function`` with the original as its first argument.

    Raises:
        TypeError: the original is a class, which cannot be replaced by a function.
    """
    if isinstance(original, type):
        raise TypeError(
            f"{original.__name__} is a class, to which around cannot be applied: use wrap instead"
        )

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return patched


def _made(original: Any, factory: Any) -> Any:
    """Return the object that ``factory`` creates from the original.

    If it is a closure, it gets the name and signature of the wrapped function and is pickled under its name.
    """
    result = factory(original)
    closure = isinstance(result, FunctionType) and "<locals>" in result.__qualname__
    if closure and isinstance(original, FunctionType) and not hasattr(result, "__wrapped__"):
        functools.update_wrapper(result, original)
    return result
