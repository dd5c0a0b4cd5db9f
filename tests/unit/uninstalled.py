"""Activates the plug-in, uninstalls it, and prints what is not as before: ``python -m`` this MODULE ...

The modules are imported in between, and a process group is made. What is compared: every name of every module
that was there before, and of its classes, and what a process has besides.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy  # noqa: F401
import torch._dynamo
import torch._inductor.runtime.cache_dir_utils
import torch.distributed.checkpoint
import torch.distributed.nn
import torch.utils.data

import megatron_npu
from megatron_npu import plugin

# What torch and Megatron change themselves when they are imported.
_OF_OTHERS = {
    ("torch._weights_only_unpickler", "_marked_safe_globals_set"),
    ("torch._higher_order_ops.invoke_leaf_function", "_leaf_function_module_retriever"),
    ("torch.distributed.distributed_c10d", "_backend"),
    ("torch.compiler._cache.CacheInfo", "pgo_artifacts"),
    ("torch.compiler._cache.CacheInfo", "precompile_artifacts"),
}
_VARIABLES_OF_OTHERS = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_CUDA_ARCH_LIST")


class AtExit:
    """Which functions of this package are to be called at exit."""

    def __init__(self) -> None:
        self.ours: set[str] = set()
        self._register, self._unregister = atexit.register, atexit.unregister
        atexit.register = self.register  # type: ignore[assignment]
        atexit.unregister = self.unregister

    def register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """As ``atexit.register``."""
        if str(function.__module__).startswith("megatron_npu"):
            self.ours.add(function.__qualname__)
        return self._register(function, *args, **kwargs)

    def unregister(self, function: Callable[..., Any]) -> None:
        """As ``atexit.unregister``."""
        self.ours.discard(getattr(function, "__qualname__", ""))
        self._unregister(function)


def process(at_exit: AtExit) -> dict[str, object]:
    """Return what a process has that is in no module."""
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {
        "SIGUSR1 for Python": signal.getsignal(signal.SIGUSR1),
        "SIGUSR1 for faulthandler": _prints_stacks(),
        "sys.excepthook": sys.excepthook,
        "our finders": [f for f in sys.meta_path if type(f).__module__.startswith("megatron_npu")],
        "our hooks on loaders": sorted(_hooked()),
        "called at exit": set(at_exit.ours),
        "environment": {k: v for k, v in os.environ.items() if k not in _VARIABLES_OF_OTHERS},
        "processors": set(_processors()),
        "threads of torch": torch.get_num_threads(),
        "threads of torch in a thread that begins": counts[0],
        "filters of logging": list(logging.getLogger().filters),
        "stand-ins": sorted(_stand_ins()),
        "command of a spawned process": multiprocessing.spawn.get_command_line,
        "flags of its interpreter": multiprocessing.util._args_from_interpreter_flags,
    }


def _prints_stacks() -> bool:
    """Return whether stacks are printed on SIGUSR1; there is no way to ask but to end it."""
    registered: bool = faulthandler.unregister(signal.SIGUSR1)  # type: ignore[func-returns-value,assignment]
    if registered:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)
    return registered


def _hooked() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if "exec_module" in getattr(loader, "__dict__", {}):
            yield name


def _processors() -> Iterator[frozenset[int]]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            yield frozenset(os.sched_getaffinity(int(task)))


def _stand_ins() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        ours = getattr(module, "__name__", name).startswith("megatron_npu.standins")
        if ours and not name.startswith("megatron_npu"):
            yield name


def names() -> dict[tuple[str, str], object]:
    """Return the values of all names in the modules that are there, and in their classes."""
    found: dict[tuple[str, str], object] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("megatron_npu", "tests")) or not isinstance(module, types.ModuleType):
            continue
        for owner_name, owner in _owners(module_name, module):
            found |= {(owner_name, name): value for name, value in list(vars(owner).items())}
    return found


def _owners(module_name: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    yield module_name, module
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module_name:
            yield f"{module_name}.{value.__qualname__}", value


def work(modules: list[str]) -> None:
    """Activate, import, and make a process group as Megatron does."""
    megatron_npu.install()
    for name in modules:
        importlib.import_module(name)
    plugin.engine().activate()
    assert plugin.engine().ledger.count("applied") > 10
    hook = sys.excepthook
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.destroy_process_group()
    sys.excepthook = hook  # torch leaves one


def differences(modules: list[str]) -> Iterator[str]:
    """Work, uninstall, and yield what is not as before.

    Raises:
        AssertionError: something of the process has not changed meanwhile, so that nothing would be seen.
    """
    at_exit = AtExit()
    kept, had = names(), process(at_exit)
    work(modules)
    meanwhile = process(at_exit)
    unchanged = {what for what in had if meanwhile[what] == had[what]} - {"filters of logging", "environment"}
    assert not unchanged, unchanged
    megatron_npu.uninstall()
    has = process(at_exit)
    for what, value in had.items():
        if has[what] != value:
            yield f"{what}: {value} -> {has[what]}"
    now, owners = names(), {owner for owner, _ in kept}
    for place in now.keys() | kept.keys():
        before, after = kept.get(place), now.get(place)
        ours = "megatron_npu" in str(getattr(after, "__module__", ""))
        if place[0] in owners and (place in kept or ours) and not _is_fine(place, before, after):
            yield f"{'.'.join(place)}: {before!r:.80} -> {after!r:.80}"


def _is_fine(place: tuple[str, str], before: object, after: object) -> bool:
    """Return whether a change is that of others, or none in value."""
    plain = isinstance(before, int | float | str | bytes | tuple) and type(before) is type(after)
    return after is before or place in _OF_OTHERS or place[1].startswith("__") or (plain and before == after)


if __name__ == "__main__":
    megatron_npu.uninstall()  # what torch's entry point has armed
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # so that this rank is bound to its cores
    found = list(differences(sys.argv[1:]))
    print("\n".join(found) or "nothing remains")
    sys.exit(bool(found))
