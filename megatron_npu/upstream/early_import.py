"""Provide our ``transformer_engine`` to programs that import it before Megatron.

The finder is at the end of ``sys.meta_path``, so a real package is found first. The finder finds the package
only if ``MEGATRON_NPU_TE=local`` selects our layers and the Megatron on the path is megatron-core; otherwise,
the package cannot be imported. While our layers are in use, ``importlib.metadata`` returns their version for
transformer-engine, which the LoRA of Megatron-Bridge 0.3.1 requires.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import spec_of
from megatron_npu.upstream import megatrons

_NAME = "transformer_engine"
_DISTRIBUTION = "transformer-engine"
_OURS = "megatron_npu.standins.transformer_engine"


class _Metadata(metadata.Distribution):
    """The name and version of our ``transformer_engine`` layers, for ``importlib.metadata``."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        """Return the content of the file ``METADATA``.

        Return None for all other file names.
        """
        text = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {self._version}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Return the path unchanged, because this distribution has no files."""
        return Path(path)


class _Loader(Loader):
    """Loader for ``transformer_engine`` that activates the plug-in, which provides the stub."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self._activate = activate

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stub module that the plug-in installed when it was activated.

        Raises:
            ImportError: no stub is installed, for example if this process was activated for another Megatron.
        """
        self._activate()
        module = sys.modules.get(spec.name)
        if module is None:
            raise ImportError(f"there is no stub of {spec.name} in this process", name=spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the stub module has already been executed."""


class _Finder:
    """Import finder for ``transformer_engine`` and, while our layers replace it, for its metadata."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self._loader = _Loader(activate)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a module spec for ``transformer_engine`` if our stub can be loaded.

        The search has no side effects.
        """
        if name != _NAME or settings.TE.get() != "local" or not _on_megatron_core():
            return None
        return ModuleSpec(name, self._loader, origin=__name__, is_package=True)

    def find_distributions(self, context: metadata.DistributionFinder.Context) -> Iterator[_Metadata]:
        """Yield the metadata of our layers if it is requested by name.

        Listings of all packages do not contain it.
        """
        module = sys.modules.get(_NAME)
        if context.name == _DISTRIBUTION and module is not None and module.__name__ == _OURS:
            yield _Metadata(module.__version__)


def _on_megatron_core() -> bool:
    try:
        return megatrons.find().name == "megatron_core"
    except UsageError:  # there is none
        return False


def is_absent(package: str) -> bool:
    """Return True if a package is not installed, without importing it or its parents.

    This finder is ignored in the search.

    Otherwise, DeepSpeed, for example, would search for apex on import.
    """
    top, *rest = package.split(".")
    spec = spec_of(top)
    if spec is None or isinstance(spec.loader, _Loader):
        return True
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return True
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec is None


def arm(activate: Callable[[], None]) -> None:
    """Install the import finder.

    ``activate`` must do the same as the first import of Megatron.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(activate))


def disarm() -> None:
    """Remove the import finder."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
