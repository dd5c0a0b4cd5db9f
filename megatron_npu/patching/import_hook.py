"""Run code after a module has been executed, or instead of its execution.

A finder at the front of ``sys.meta_path`` lets other finders find a module and hooks the returned loader, so
nothing happens if code merely checks whether a package exists.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Run = Callable[[ModuleType], None]


class Finder:
    """Import finder that hooks the loaders that other finders have found.

    Args:
        covers: returns whether to hook the module with the given name.
        execute: called instead of ``exec_module``, with the loader's ``exec_module`` and the module.
    """

    def __init__(self, covers: Callable[[str], bool], execute: Callable[[Run, ModuleType], None]) -> None:
        self.covers, self.execute = covers, execute
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that other finders have found, with a hooked loader."""
        if not self.covers(name):
            return None
        names: set[str] = self._asking.__dict__.setdefault("names", set())
        if name in names:  # a finder that asks the others, as this one does, asks us in turn
            return None
        names.add(name)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            names.remove(name)
        if spec is not None:
            self._hook(spec.loader)
        return spec

    def _ask_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                return spec
        return None

    def _hook(self, loader: Any) -> None:
        """Hook a loader, unless it is already hooked.

        Built-in modules, whose loaders are classes, and namespace packages are skipped.
        """
        run = getattr(loader, "exec_module", None)
        if run is None or isinstance(loader, type):
            return
        if not (isinstance(run, _Hook) and run.finder is self):
            loader.exec_module = _Hook(loader, self)

    @property
    def armed(self) -> bool:
        """True if this finder is installed in ``sys.meta_path``."""
        return self in sys.meta_path

    def arm(self) -> None:
        """Install this finder at the front of ``sys.meta_path``. A second call has no effect."""
        if not self.armed:
            sys.meta_path.insert(0, self)

    def disarm(self) -> None:
        """Remove this finder, and restore ``exec_module`` on the loaders of all loaded modules."""
        if self.armed:
            sys.meta_path.remove(self)
        for module in list(sys.modules.values()):
            # not getattr: a package may import half of itself when it is asked for a name (torch_npu.dynamo)
            loader: Any = getattr(getattr(module, "__dict__", {}).get("__spec__"), "loader", None)
            hook = getattr(loader, "__dict__", {}).get("exec_module")
            if isinstance(hook, _Hook) and hook.finder is self:
                del loader.exec_module


class _Hook:
    """Replacement for ``exec_module`` on an instance of a loader, whose type is left unchanged.

    Copying or pickling it yields the loader's own method, so a copied loader is an ordinary loader.
    """

    def __init__(self, loader: Any, finder: Finder) -> None:
        self._loader, self._run, self.finder = loader, loader.exec_module, finder

    def __call__(self, module: ModuleType) -> None:
        self.finder.execute(self._run, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._loader, "exec_module")


class _WatchedSpec(ModuleSpec):
    """Module spec that calls a function when the execution of the module ends."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            callbacks = self.__dict__.pop("_callbacks")
            super().__setattr__("__class__", ModuleSpec)  # it is an ordinary one again
            for callback in callbacks:
                callback()


def is_initializing(module: ModuleType) -> bool:
    """Return True if a module is still being executed."""
    return bool(getattr(module.__spec__, "_initializing", False))


def when_initialized(module: ModuleType, callback: Callable[[], None]) -> None:
    """Call ``callback`` when the execution of a module ends."""
    spec: Any = module.__spec__
    if type(spec) is ModuleSpec:
        vars(spec)["_callbacks"] = []
        spec.__class__ = _WatchedSpec
    if isinstance(spec, _WatchedSpec):
        vars(spec)["_callbacks"].append(callback)
