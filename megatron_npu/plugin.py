"""Activate the package: wait for the first import of ``megatron`` and patch upstream once per process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from megatron_npu import adaptors
from megatron_npu.adaptors.shared.decorators import OURS
from megatron_npu.base import settings
from megatron_npu.base.errors import LoaderWorkerError, UnsavedStateError, UsageError
from megatron_npu.patching import banner
from megatron_npu.patching.engine import Engine
from megatron_npu.patching.import_hook import Finder, Run
from megatron_npu.patching.module_patch import Context, DriftError
from megatron_npu.patching.pins import PinError, Pins
from megatron_npu.patching.registry import registry
from megatron_npu.process import (
    deepspeed_device,
    one_line_end,
    spawn_without_gpus,
    spawned_processes,
    stacks,
    torchrun_waits,
    vector_probe,
    visible_devices,
)
from megatron_npu.safe_files import rendezvous_state
from megatron_npu.upstream import early_import, megatrons, stock_tools

if TYPE_CHECKING:
    from megatron_npu.devices import Device
    from megatron_npu.devices.redirect import Redirection

# packages of tasks/main.py of Megatron's trees, which imports them by these names
TASKS = ("zeroshot_gpt", "tasks.orqa")

_logger = logging.getLogger(__name__)
# How to undo what installing, redirecting and activating have changed in this process. What may happen twice,
# after an activation that failed for instance, changes nothing the second time, done or undone.
_undoing = ExitStack()


def pins_directory() -> Path:
    """Return the folder of the pin files.

    The folder is inside the package in a wheel, and next to the package otherwise.
    """
    package = Path(__file__).resolve().parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


@cache
def engine() -> Engine:
    """Return the patch engine of this process."""
    return Engine(registry, prefixes=("megatron", *TASKS), on_first=_activate)


def install() -> None:
    """Install the engine's import hook, and patch the modules that were already imported."""
    if not engine().armed:
        _guard_torch()
        _undoing.callback(engine().disarm)
        engine().arm()
        _undoing.callback(early_import.disarm)
        early_import.arm(engine().activate)
        engine().apply_loaded()
        _undoing.callback(spawned_processes.disarm)
        spawned_processes.arm()
        _undoing.callback(spawn_without_gpus.leave)
        spawn_without_gpus.watch(_count_npus)
        torchrun_waits.watch()


def _count_npus() -> int:
    """Return the number of NPUs that a redirection would map ``torch.cuda`` to."""
    from megatron_npu import devices

    if os.environ.get(settings.DEVICE.name, "").strip() == "cpu":
        return 0
    npu = devices.NpuDevice()
    return npu.count() if npu.absence() is None else 0


def cure_numbers() -> None:
    """Fix upstream bugs that would make the results of this project's own commands wrong.

    In stock scripts, these bugs are not fixed unless the user requests it (``MEGATRON_NPU_BACKPORT``).
    """
    if not OURS.get():
        _undoing.callback(OURS.reset, OURS.set(True))
    engine().reconsider()


def installed() -> bool:
    """Return True if the engine's import hook is installed."""
    return engine().armed


def uninstall() -> None:
    """Undo every patch, and then undo all other changes in this process, in reverse order.

    Names that were imported by value from ``torch.cuda`` during the redirection keep their value. Other
    processes that are already running are not affected.
    """
    engine().undo()
    _undoing.close()


def redirect(scripts: str) -> None:
    """Map ``torch.cuda`` to this machine's device before Megatron is imported, also in child processes.

    Args:
        scripts: the folder of the program to run. For its modules and for those of Megatron, device tensors
            appear as CUDA tensors.

    Raises:
        UsageError: the device in ``MEGATRON_NPU_DEVICE`` is not available.
    """
    from megatron_npu.devices.redirect import callers

    _undoing.callback(callers.SEE_CUDA_TENSORS.include, None)
    callers.SEE_CUDA_TENSORS.include(Path(scripts))
    _redirect_torch()
    _undoing.callback(spawned_processes.disarm)
    spawned_processes.run_first(f"megatron_npu.plugin.redirect({scripts!r})")


def redirect_program() -> None:
    """Redirect torch to this machine's device in this process, as ``megatron-npu run --redirect`` does for a
    script.

    Raises:
        UsageError: see ``redirect``; or CUDA's variable selects NPUs, but torch_npu is already imported.
    """
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if visible_devices.name_for_ascend() and "torch_npu" in sys.modules:
        raise UsageError(
            f"{visible_devices.CUDA}={os.environ[visible_devices.CUDA]} with {settings.REDIRECT.name}=1 "
            "has no effect, because torch_npu has already started and selected its NPUs",
            remedy=f"Set {visible_devices.ASCEND} instead, or start the program with `megatron-npu run "
            "--redirect`.",
        )
    redirect(str(program.resolve().parent if program and program.is_file() else Path.cwd()))


@cache
def _redirection() -> Redirection:
    from megatron_npu import devices
    from megatron_npu.devices.redirect import Redirection

    return Redirection(devices.current())


def _redirect_torch() -> Device:
    """Select the device and redirect torch. A second call has no effect."""
    from megatron_npu.devices import loader_workers

    redirection = _redirection()
    spawn_without_gpus.leave()  # torch.cuda counts devices from here on
    _undoing.callback(redirection.off)
    redirection.on()
    _undoing.callback(redirection.device.release)
    redirection.device.prepare()
    _undoing.callback(loader_workers.end)
    loader_workers.begin()  # on cuda too: what loads data are processes of the host, wherever the model is
    return redirection.device


@cache
def announce() -> None:
    """Print once on rank 0 which upstream and device are used, and how many patches are applied."""
    from megatron_npu import __version__, devices

    context, device = engine().context, devices.current()
    if context is None or int(os.environ.get("RANK", "0")):
        return
    line = (
        f"megatron_npu {__version__} · {context.upstream} {context.version} · "
        f"{device.title}/{device.backend} · {engine().ledger.summary()}"
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding), flush=True)  # ASCII has no middle dot


def _guard_files(name: str) -> None:
    """Prevent checkpoints from executing code when torch reads them, unless the user trusts all of them."""
    from megatron_npu.safe_files import torch_readers

    if settings.TRUST_FILES.enabled():
        variable = settings.TRUST_FILES.name
        _logger.warning("%s=1: checkpoints may execute the code that they contain", variable)
    elif name == "megatron_core":  # the other has no checkpoints of this kind
        _undoing.callback(torch_readers.release)
        torch_readers.guard()


def _guard_torch() -> None:
    """Prevent torch from executing code from files in a run's store or in the working directory.

    The modules are guarded when they are imported: torchrun imports one of them before ranks exist.
    """
    guards = {rendezvous_state.MODULE: _guard_rendezvous, vector_probe.MODULE: vector_probe.guard}

    def execute(run: Run, module: ModuleType) -> None:
        run(module)
        guards[module.__name__](module)

    finder = Finder(guards.__contains__, execute)
    _undoing.callback(rendezvous_state.release)
    _undoing.callback(vector_probe.release)
    _undoing.callback(finder.disarm)
    finder.arm()
    for name in guards.keys() & sys.modules.keys():
        guards[name](sys.modules[name])


def _guard_rendezvous(module: ModuleType) -> None:
    """Make torch's rendezvous read its stored state as plain data, without unpickling it.

    An error ends torchrun with a one-line message.
    """
    _undoing.callback(one_line_end.arm(UsageError, module.RendezvousStateError).disarm)
    rendezvous_state.guard(module)


@contextlib.contextmanager
def _kept_environment(*names: str) -> Iterator[None]:
    """Restore the environment variables with the given names at the end of the ``with`` block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _of_own_program(error: BaseException) -> bool:
    return stock_tools.blames_program(error, _main_file())


def _main_file() -> Path:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "")


def _activate() -> Context:
    """Find the upstream, select the device, redirect torch, and import upstream's adaptors."""
    from megatron_npu import standins
    from megatron_npu.checkpoint_files.replicas import ReplicasDifferError
    from megatron_npu.ops import dispatch

    kinds = UsageError, DriftError, PinError, ReplicasDifferError, LoaderWorkerError, UnsavedStateError
    _undoing.callback(one_line_end.arm(*kinds, traced=_of_own_program).disarm)
    settings.check()
    _undoing.callback(stacks.leave_signal)
    stacks.print_on_signal()
    if stacks.print_at_crash():
        _undoing.callback(stacks.leave_crashes)
    found = megatrons.find()
    found.require_supported(_main_file())
    stock_tools.refuse(_main_file(), sys.argv[1:])
    device = _redirect_torch()
    if found.name.startswith("megatron_deepspeed"):
        _undoing.enter_context(_kept_environment(*deepspeed_device.VARIABLES))
        deepspeed_device.choose(device.name)
    _undoing.callback(standins.remove)
    standins.install(found)
    engine().ledger.fallbacks = dispatch.fallbacks
    engine().ledger.about = {
        "upstream": found.name,
        "version": found.version,
        "device": device.title,
        "backend": device.backend,
        "simulated": device.simulated,
    }
    adaptors.register(found.name)
    _guard_files(found.name)
    _undoing.callback(banner.prepare, None)
    banner.prepare(announce)
    return Context(
        upstream=found.name,
        version=found.version,
        device=device.name,
        pins=Pins.load(pins_directory(), found.name, found.version),
        drift=settings.DRIFT.get(),
    )
