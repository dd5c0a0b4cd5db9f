"""Where modules of upstream hold what was patched under no name: tables, partials, defaults, closures, bases.

Python evaluates ``TABLE = {"gelu": gelu}``, ``partial(gelu)`` and ``def f(act=gelu)`` while the body runs, so
they hold what was there before the patch, and a call through them gets upstream's own. No symbol that is
patched in a supported upstream may be so held: ``python -m tests.captured_references`` imports whatever has a
patch of the Megatron on the path, and fails where one is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterator
from dataclasses import Field
from types import FunctionType, ModuleType
from typing import Any

from megatron_npu import plugin
from megatron_npu.patching.attribute_patch import MISSING, Change, bare
from megatron_npu.patching.engine import Engine

DEPTH = 4  # of values in values: a dataclass, its fields, a field, its default
_LARGEST = 1000  # a longer table is data
_CACHED = type(functools.lru_cache(lambda: None))


def captures(module: ModuleType, wanted: Container[int], ours: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield (place in words, value) for every value inside those of ``module`` whose id is in ``wanted``.

    Searched are module-level containers and partials, and of the functions and classes that ``module``
    itself defines: defaults, closures, class attributes, fields of dataclasses, bases. Neither annotations
    nor instances are.

    Args:
        ours: ids of values not to look into: new functions may well hold the original.
    """
    seen: set[int] = set()

    def search(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
        if not depth or id(value) in seen or id(value) in ours:
            return
        seen.add(id(value))
        for words, part in _parts(value, module.__name__):
            if id(part) in wanted:
                yield where + words, part
            else:
                yield from search(part, where + words, depth - 1)

    for name, value in vars(module).copy().items():
        if not _is_special(name):
            yield from search(value, f"{module.__name__}.{name}", DEPTH)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _parts(value: Any, module: str) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` holds, with the words that lead there from it."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict) and len(value) <= _LARGEST:
        for key, part in value.copy().items():
            yield f"[{_brief(key)}]", part
            yield " (a key)", key
    elif kind in (list, tuple, set, frozenset) and len(value) <= _LARGEST:
        yield from (("", part) for part in tuple(value))
    elif kind is functools.partial:
        yield "", value.func
        yield from ((" (an argument)", part) for part in (*value.args, *value.keywords.values()))
    elif kind in (staticmethod, classmethod):
        yield "", value.__func__
    elif kind is property:
        yield from (("", part) for part in (value.fget, value.fset, value.fdel))
    elif kind is Field:
        yield from ((f".{name}", getattr(value, name)) for name in ("default", "default_factory"))
    elif kind is _CACHED:
        yield " (a cache)", value.__wrapped__
    elif kind is FunctionType and value.__module__ == module:
        yield from _parts_of_function(value)
    elif isinstance(value, type) and value.__module__ == module:
        yield from _parts_of_class(value)


def _brief(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else getattr(key, "__qualname__", type(key).__name__)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((" (a default)", part) for part in defaults)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":  # super() without arguments needs the class that the body made
            continue
        try:
            yield f" (its closure's {name})", cell.cell_contents
        except ValueError:  # still empty
            continue


def _parts_of_class(cls: type) -> Iterator[tuple[str, Any]]:
    yield from ((" (a base class)", base) for base in cls.__bases__)
    for name, part in vars(cls).copy().items():
        # of the special ones, methods and fields; not annotations and the like
        if not _is_special(name) or isinstance(part, FunctionType) or name == "__dataclass_fields__":
            yield f".{name}", part


def held(engine: Engine) -> dict[str, list[str]]:
    """Return target -> the places in imported modules of upstream that still hold its original."""
    changes = engine._log.all()
    originals: dict[int, Change] = {}
    for change in changes:
        if callable(bare(change.old)) and change.old is not MISSING and change.old is not change.new:
            originals |= {id(bare(change.old)): change, id(change.old): change}
    ours = {id(value) for change in changes for value in (change.new, bare(change.new))}
    found: dict[str, list[str]] = {change.target: [] for change in changes}
    for name, module in sys.modules.copy().items():
        if engine.covers(name) and isinstance(module, ModuleType):
            for place, value in captures(module, originals, ours):
                change = originals[id(value)]
                if module is change.module or engine.covers(getattr(bare(value), "__module__", None) or ""):
                    found[change.target].append(place)  # elsewhere a name of torch means torch's
    return found


def _import(*names: str) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # of another version, or for a package that is not installed
            importlib.import_module(name)


def main() -> None:
    """Patch all that the Megatron on the path has, and look."""
    plugin.install()
    engine = plugin.engine()
    _import("megatron", "megatron.core")  # now the patches are on record
    _import(*engine.registry.modules())
    found = held(engine)
    assert len(found) > 20
    places = {target: places for target, places in found.items() if places}
    assert not places, places
    print(f"{len(found)} targets, none of them held")


if __name__ == "__main__":
    main()
