"""Provide inert stub modules for packages that a command imports but does not use.

Help texts and static commands import modules that start with ``import torch`` for annotations, base classes,
decorators and tables, but do not compute anything. With inert stubs, these modules work without torch, and a
help text is printed without waiting for the import of torch. Every attribute of an inert module is an empty
class.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_npu.base.installed_packages import is_installed

# Slow to import, and of no use to a help text.
SLOW = ("torch", "megatron")
# What pyproject.toml declares; where only the sources are on the path, these may be absent as well.
DECLARED = ("numpy", "psutil", "regex", "six", "tokenizers", "tqdm")
_PROJECT = __name__.partition(".")[0]


@contextlib.contextmanager
def for_help() -> Iterator[None]:
    """Import modules only for their help texts inside the ``with`` block, and unload them afterwards."""
    names = [*_not_imported(SLOW), *_absent(DECLARED)]
    before = set(sys.modules)
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] in (*names, _PROJECT):
                del sys.modules[name]


def for_records() -> None:
    """Import adaptors only for their patch records inside the ``with`` block.

    Missing packages remain inert afterwards.
    """
    names = _absent(("torch", *DECLARED))
    if names:
        sys.meta_path.insert(0, _Finder(names))


def _not_imported(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in sys.modules]


def _absent(names: Sequence[str]) -> list[str]:
    return [name for name in _not_imported(names) if not is_installed(name)]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Module finder that provides inert modules in place of given packages and their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because an inert module has no body."""


class _Module(types.ModuleType):
    """A module in which every name exists and has no effect."""

    def __getattr__(self, name: str) -> Any:
        return _inert(name, self.__name__)


class _Inert(type):
    """Metaclass of the names in inert modules.

    The names are classes, so that other classes can inherit from them.
    """

    def __getattr__(cls, name: str) -> Any:
        return _inert(name, f"{cls.__module__}.{cls.__qualname__}")

    def __contains__(cls, item: object) -> bool:  # a text of torch's that is looked into at import
        return False

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if not cls.__dict__.get("_is_inert"):  # a class of ours that inherits from one
            return super().__call__(*arguments, **options)
        # a decorator gives back what it decorates
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType) else cls


@functools.cache
def _inert(name: str, owner: str) -> Any:
    if name.startswith("__"):  # the interpreter asks for many, each with a meaning
        raise AttributeError(name)
    return _Inert(name, (), {"__module__": owner, "_is_inert": True})
