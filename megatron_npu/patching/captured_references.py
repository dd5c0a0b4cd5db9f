"""Where the values of a module hold an object under no name: tables, partials, defaults, closures.

Python evaluates ``TABLE = {"gelu": gelu}``, ``partial(gelu)`` and ``def f(act=gelu)`` while the body runs, so
they hold what was there before the patch.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import Field, dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from megatron_npu.patching.attribute_patch import MISSING, Change

DEPTH = 4  # of values in values: a dataclass, its fields, a field, its default
_LARGEST = 1000  # a longer table is data
_CACHED = type(functools.lru_cache(lambda: None))


@dataclass(slots=True)
class Held:
    """One place that holds a value.

    Attributes:
        where: the place in words, ``package.module.TABLE['gelu']``.
        value: what is there now.
        get, put: read and set it; None where that cannot be done in place.
    """

    where: str
    value: Any
    get: Callable[[], Any] | None = None
    put: Callable[[Any], None] | None = None


@dataclass
class CapturedChange(Change):
    """The change of a value that is no attribute; ``owner`` is its ``Held``, ``name`` the words for it."""

    def __str__(self) -> str:
        return self.name

    def make(self) -> None:
        """Set the new value."""
        self.owner.put(self.new)

    def undo(self) -> bool:
        """Put the old value back, unless somebody has set another one since; return whether it was done."""
        if self.owner.get() is not self.new:
            return False
        self.owner.put(self.old)
        return True


def captures(module: ModuleType, wanted: Container[int], ours: Container[int]) -> Iterator[Held]:
    """Yield every place in the values of ``module`` that holds an object whose id is in ``wanted``.

    Searched are module-level containers and partials, and of the functions and classes that ``module``
    itself defines: defaults, closures, class attributes, fields of dataclasses, bases. Neither annotations
    nor instances are.

    Args:
        ours: ids of values not to look into: new functions may well hold the original.
    """
    search = _Search(module.__name__, wanted, ours)
    for name, value in vars(module).copy().items():
        if not _is_special(name):
            yield from search.inside(value, f"{module.__name__}.{name}", DEPTH)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Search:
    def __init__(self, module: str, wanted: Container[int], ours: Container[int]) -> None:
        self._module, self._wanted, self._ours = module, wanted, ours
        self._seen: set[int] = set()

    def inside(self, value: Any, where: str, depth: int) -> Iterator[Held]:
        """Yield the places inside ``value``; ``where`` are the words for it."""
        places = _PLACES.get(type(value)) or (_of_class if isinstance(value, type) else None)
        if places is None or not depth or id(value) in self._seen or id(value) in self._ours:
            return
        if isinstance(value, (FunctionType, type)) and value.__module__ != self._module:
            return
        self._seen.add(id(value))
        for held in places(value, where):
            if id(held.value) in self._wanted:
                yield held
            else:
                yield from self.inside(held.value, held.where, depth - 1)


def _may_matter(value: Any) -> bool:
    """Return whether ``value`` may be a symbol or hold one; most defaults and attributes are plain values."""
    return callable(value) or type(value) in _PLACES


def _of_mapping(mapping: dict[Any, Any], where: str) -> Iterator[Held]:
    if len(mapping) > _LARGEST:
        return
    for key, value in mapping.copy().items():
        yield Held(
            f"{where}[{_brief(key)}]",
            value,
            functools.partial(mapping.get, key),
            functools.partial(mapping.__setitem__, key),
        )
        yield Held(f"{where} (a key)", key)


def _brief(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else getattr(key, "__qualname__", type(key).__name__)


def _of_list(items: list[Any], where: str) -> Iterator[Held]:
    if len(items) > _LARGEST:
        return
    for position, value in enumerate(items.copy()):

        def get(position: int = position) -> Any:
            return items[position] if position < len(items) else MISSING

        yield Held(f"{where}[{position}]", value, get, functools.partial(items.__setitem__, position))


def _of_fixed(items: tuple[Any, ...] | set[Any] | frozenset[Any], where: str) -> Iterator[Held]:
    if len(items) <= _LARGEST:
        yield from (Held(where, value) for value in tuple(items))


def _of_partial(partial: functools.partial[Any], where: str) -> Iterator[Held]:
    def put(func: Any) -> None:
        writable: Any = partial  # its func is read-only; typeshed does not know __setstate__
        writable.__setstate__((func, partial.args, partial.keywords, vars(partial)))

    yield Held(where, partial.func, lambda: partial.func, put)
    yield from _of_fixed(partial.args, f"{where} (an argument)")
    yield from _of_mapping(partial.keywords, f"{where} (an argument)")


def _of_function(function: FunctionType, where: str) -> Iterator[Held]:
    for position, value in enumerate(function.__defaults__ or ()):
        if _may_matter(value):
            yield _default(function, position, value, where)
    if function.__kwdefaults__:
        yield from _of_mapping(function.__kwdefaults__, f"{where} (a default)")
    if function.__closure__ is None:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        if name != "__class__":  # super() without arguments needs the class that the body made
            yield from _of_cell(cell, f"{where} (its closure's {name})")


def _default(function: FunctionType, position: int, value: Any, where: str) -> Held:
    def get() -> Any:
        defaults = function.__defaults__ or ()
        return defaults[position] if position < len(defaults) else MISSING

    def put(new: Any) -> None:
        defaults = list(function.__defaults__ or ())
        defaults[position] = new
        function.__defaults__ = tuple(defaults)

    return Held(f"{where} (a default)", value, get, put)


def _of_cell(cell: CellType, where: str) -> Iterator[Held]:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return
    yield Held(where, value, lambda: cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))


def _of_class(cls: type, where: str) -> Iterator[Held]:
    yield from (Held(f"{where} (a base class)", base) for base in cls.__bases__)
    for name, value in vars(cls).copy().items():
        if _is_special(name) and not isinstance(value, FunctionType) and name != "__dataclass_fields__":
            continue  # annotations and the like
        if _may_matter(value):
            yield _attribute(cls, name, value, where)


def _attribute(owner: Any, name: str, value: Any, where: str) -> Held:
    def get() -> Any:
        return vars(owner).get(name, MISSING) if isinstance(owner, type) else getattr(owner, name, MISSING)

    return Held(f"{where}.{name}", value, get, functools.partial(setattr, owner, name))


def _of_field(field: Field[Any], where: str) -> Iterator[Held]:
    yield _attribute(field, "default", field.default, where)
    yield _attribute(field, "default_factory", field.default_factory, where)


def _of_descriptor(descriptor: Any, where: str) -> Iterator[Held]:
    yield Held(where, descriptor.__func__)


def _of_property(prop: property, where: str) -> Iterator[Held]:
    yield from (Held(where, function) for function in (prop.fget, prop.fset, prop.fdel))


def _of_cached(cached: Any, where: str) -> Iterator[Held]:
    yield Held(f"{where} (a cache)", cached.__wrapped__)


_PLACES: dict[type, Callable[[Any, str], Iterator[Held]]] = {
    dict: _of_mapping,
    OrderedDict: _of_mapping,
    defaultdict: _of_mapping,
    list: _of_list,
    tuple: _of_fixed,
    set: _of_fixed,
    frozenset: _of_fixed,
    functools.partial: _of_partial,
    FunctionType: _of_function,
    Field: _of_field,
    staticmethod: _of_descriptor,
    classmethod: _of_descriptor,
    property: _of_property,
    _CACHED: _of_cached,
}
