"""Who imports ``transformer_engine`` before Megatron finds what is put in place when Megatron is imported.

A finder at the end of ``sys.meta_path``, so that a real package is found first. It answers only where
``MEGATRON_NPU_TE=local`` asks for our layers and the Megatron on the path is megatron-core; elsewhere the
package is as absent as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_npu import settings, upstream
from megatron_npu.errors import UsageError

_NAME = "transformer_engine"


class _Finder:
    """Finds ``transformer_engine``, and is its loader: the import activates the plug-in, which has it."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self._activate = activate

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for ``transformer_engine`` where it can be loaded; asking changes nothing."""
        if name != _NAME or settings.TE.get() != "local" or not _on_megatron_core():
            return None
        return ModuleSpec(name, self, origin=__name__, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in, which the activation has put in place.

        Raises:
            ImportError: it has not, in an earlier activation for another Megatron for instance.
        """
        self._activate()
        module = sys.modules.get(spec.name)
        if module is None:
            raise ImportError(f"no stand-in for {spec.name} in this process", name=spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the body of the stand-in has run."""


def _on_megatron_core() -> bool:
    try:
        return upstream.find().name == "megatron_core"
    except UsageError:  # there is none
        return False


def is_absent(package: str) -> bool:
    """Return whether nobody but this finder finds a package.

    Raises:
        ModuleNotFoundError: its parent is absent, or no package.
    """
    spec = importlib.util.find_spec(package)
    return spec is None or isinstance(spec.loader, _Finder)


def arm(activate: Callable[[], None]) -> None:
    """Put the finder in place; ``activate`` does what the first import of Megatron does."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(activate))


def disarm() -> None:
    """Take it out again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
