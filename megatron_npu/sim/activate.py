"""Set up simulated NPUs in this Python process when torch is imported.

boot/sitecustomize.py installs the import hook.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent


@contextmanager
def unarmed() -> Iterator[None]:
    """Import submodules without executing ``megatron_npu/__init__.py``, which would activate the plug-in.

    A simulated machine is a machine with NPUs, on which the plug-in is not necessarily active: the program
    that runs on it determines that.
    """
    if "megatron_npu" in sys.modules:
        yield
        return
    placeholder = ModuleType("megatron_npu")
    placeholder.__path__ = [str(_PACKAGE)]
    sys.modules["megatron_npu"] = placeholder
    try:
        yield
    finally:
        del sys.modules["megatron_npu"]


def arm(site: str) -> None:
    """Install a finder that loads the simulated CANN when torch is imported.

    Programs that never import torch, such as shells and tools, have no overhead.

    Args:
        site: the directory that contains torch_npu; it is appended to ``sys.path``, so that it hides no other
            package.
    """
    if site not in sys.path:
        sys.path.append(site)
    forget_stand_in()
    sys.meta_path.insert(0, _Finder())


def forget_stand_in() -> None:
    """Remove the placeholder CANN folder that a parent process has set for DeepSpeed.

    ``deepspeed_device.choose`` sets a folder that does not exist, for DeepSpeed only, but torch_npu would
    look for CANN there.
    """
    if os.environ.get("ASCEND_HOME_PATH") == "/nowhere":
        del os.environ["ASCEND_HOME_PATH"]


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder that activates a context manager while a package is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CONTEXTS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, _CONTEXTS[fullname])
        return spec


class _Around(importlib.abc.Loader):
    """Loader that activates a context manager while a package is executed."""

    def __init__(self, loader: Any, context: Callable[[], AbstractContextManager]) -> None:
        self._loader, self._context = loader, context

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._context():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:  # get_resource_reader and the like stay the package's
        return getattr(self._loader, name)


@contextmanager
def _around_torch() -> Iterator[None]:
    with unarmed():
        load_runtime()
    yield


@contextmanager
def _around_torch_npu() -> Iterator[None]:
    # It prints a warning that no CANN is installed; the program's own output must stay what it is.
    with redirect_stdout(sys.stderr):
        yield
    with unarmed():
        from megatron_npu.sim import install

        install.install()


@contextmanager
def _around_megatron_npu() -> Iterator[None]:
    """Set attributes for submodules that were imported before the package itself."""
    yield
    package = sys.modules["megatron_npu"]
    for name, module in sys.modules.copy().items():
        parent, _, attribute = name.rpartition(".")
        if parent == "megatron_npu" and not hasattr(package, attribute):
            setattr(package, attribute, module)


_CONTEXTS: dict[str, Callable[[], AbstractContextManager]] = {
    "torch": _around_torch,
    "torch_npu": _around_torch_npu,
    "megatron_npu": _around_megatron_npu,
}


def load_runtime() -> None:
    """Load the simulated CANN into this process under CANN's library names, and pass the settings to it.

    The dynamic loader resolves torch_npu's dependencies by name to libraries that are already loaded, so no
    LD_LIBRARY_PATH is required, which a running process could not change for itself anyway.
    """
    from megatron_npu.base import malloc, settings
    from megatron_npu.sim import build, cache
    from megatron_npu.sim.settings import simulator_values

    if not settings.SIM_DRY.value():  # a dry run touches few pages of its tensors
        malloc.keep_freed_memory()
    runtime = build.runtime_library()
    for path in build.cann_names(build.runtime()):
        cache.load(path, ctypes.RTLD_GLOBAL)
    for name, value in simulator_values().items():
        runtime.sim_set(name.encode(), value.encode())
    # Kernels run on the calling thread. torch_npu's task queue would run events and copies on another one,
    # out of order with them.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
