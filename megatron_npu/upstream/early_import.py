"""Who imports ``transformer_engine`` before Megatron finds what is put in place when Megatron is imported.

A finder at the end of ``sys.meta_path``, so that a real package is found first. It answers only where
``MEGATRON_NPU_TE=local`` asks for our layers and the Megatron on the path is megatron-core; elsewhere the
package is as absent as it is. While our layers stand there, who asks packages' metadata for the version of
transformer-engine, as the LoRA of Megatron-Bridge 0.3.1 does, is told theirs.
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
    """What ``importlib.metadata`` is told of our layers: name and version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def read_text(self, filename: str) -> str | None:
        """Return the text of ``METADATA``; there is no other file."""
        text = f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: {self._version}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Return the path: there are no files."""
        return Path(path)


class _Loader(Loader):
    """Loads ``transformer_engine``: the import activates the plug-in, which puts it in place."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self._activate = activate

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stub, which the activation has put in place.

        Raises:
            ImportError: it has not, in an earlier activation for another Megatron for instance.
        """
        self._activate()
        module = sys.modules.get(spec.name)
        if module is None:
            raise ImportError(f"no stub of {spec.name} in this process", name=spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the body of the stub has run."""


class _Finder:
    """Finds ``transformer_engine``, and its metadata while our layers stand for it."""

    def __init__(self, activate: Callable[[], None]) -> None:
        self._loader = _Loader(activate)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for ``transformer_engine`` where it can be loaded; asking changes nothing."""
        if name != _NAME or settings.TE.get() != "local" or not _on_megatron_core():
            return None
        return ModuleSpec(name, self._loader, origin=__name__, is_package=True)

    def find_distributions(self, context: metadata.DistributionFinder.Context) -> Iterator[_Metadata]:
        """Yield the package, while our layers stand for it, to who asks for it by name; it is in no list."""
        module = sys.modules.get(_NAME)
        if context.name == _DISTRIBUTION and module is not None and module.__name__ == _OURS:
            yield _Metadata(module.__version__)


def _on_megatron_core() -> bool:
    try:
        return megatrons.find().name == "megatron_core"
    except UsageError:  # there is none
        return False


def is_absent(package: str) -> bool:
    """Return whether only this finder finds a package; none of its parents is imported.

    DeepSpeed, for one, looks for apex while it is imported.
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
    """Put the finder in place; ``activate`` does what the first import of Megatron does."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(activate))


def disarm() -> None:
    """Take it out again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
