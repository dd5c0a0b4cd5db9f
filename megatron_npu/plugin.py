"""The wiring: from the first import under ``megatron`` to a patched upstream, once per process."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_npu import (
    deepspeed_device,
    early_import,
    one_line_end,
    settings,
    spawned_processes,
    stacks,
    stock_tools,
)
from megatron_npu.errors import LoaderWorkerError, UsageError
from megatron_npu.patching import banner
from megatron_npu.patching.engine import Engine
from megatron_npu.patching.module_patch import Context, DriftError
from megatron_npu.patching.pins import PinError, Pins
from megatron_npu.patching.registry import registry

if TYPE_CHECKING:
    from megatron_npu.devices import Device
    from megatron_npu.devices.redirect import Redirection

TASKS = ("zeroshot_gpt",)  # packages beside Megatron's tasks/main.py, which imports them by these names

_logger = logging.getLogger(__name__)
_redirection: Redirection | None = None


def pins_directory() -> Path:
    """Return where the pin files lie: inside the package in a wheel, else beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


@cache
def engine() -> Engine:
    """Return the engine of this process."""
    return Engine(registry, prefixes=("megatron", *TASKS), on_first=_activate)


def install() -> None:
    """Arm the engine, and patch what was imported before it."""
    if not engine().armed:
        engine().arm()
        early_import.arm(engine().activate)
        engine().apply_loaded()
        spawned_processes.arm()


def installed() -> bool:
    """Return whether the engine is armed."""
    return engine().armed


def uninstall() -> None:
    """Undo every patch, end the redirection, disarm the engine."""
    global _redirection
    from megatron_npu import standins

    engine().undo()
    engine().disarm()
    early_import.disarm()
    spawned_processes.disarm()
    standins.remove()
    one_line_end.disarm()
    if _redirection is not None:
        from megatron_npu import torch_readers
        from megatron_npu.devices import loader_workers
        from megatron_npu.devices.redirect import callers

        torch_readers.release()
        loader_workers.end()
        callers.SEE_CUDA_TENSORS.include(None)
        _redirection.off()
        _redirection.device.release()
        _redirection = None


def redirect(scripts: str) -> None:
    """Let ``torch.cuda`` mean this machine's device at once, without waiting for Megatron; in children, too.

    Args:
        scripts: the folder of the program that is to run; its modules are told that tensors on the device
            are CUDA's, as Megatron's are.

    Raises:
        UsageError: ``MEGATRON_NPU_DEVICE`` asks for a device that is absent.
    """
    from megatron_npu.devices.redirect import callers

    callers.SEE_CUDA_TENSORS.include(Path(scripts))
    _redirect_torch()
    spawned_processes.run_first(f"megatron_npu.plugin.redirect({scripts!r})")


def _redirect_torch() -> Device:
    """Select the device and redirect torch; a second time nothing changes."""
    global _redirection
    from megatron_npu import devices
    from megatron_npu.devices import loader_workers
    from megatron_npu.devices.redirect import Redirection

    device = devices.current()
    if _redirection is None:  # else redirected already: by request, or by an activation that failed later
        _redirection = Redirection(device)
    _redirection.on()
    device.prepare()
    loader_workers.begin()  # on cuda, too: what loads data are processes of the host, wherever the model is
    return device


@cache
def announce() -> None:
    """Say once, on rank 0, which upstream and device run and how many patches are applied."""
    from megatron_npu import __version__, devices

    context, device = engine().context, devices.current()
    if context is None or int(os.environ.get("RANK", "0")):
        return
    print(
        f"megatron_npu {__version__} · {context.upstream} {context.version} · "
        f"{device.title}/{device.backend} · {engine().ledger.summary()}",
        flush=True,
    )


def _guard_files(upstream: str) -> None:
    """Let no checkpoint run code when torch reads it, unless the user trusts them all."""
    from megatron_npu import torch_readers

    if settings.TRUST_FILES.enabled():
        name = settings.TRUST_FILES.name
        _logger.warning("%s=1: checkpoints may run the code that they hold", name)
    elif upstream == "megatron_core":  # the other has no checkpoints of this kind
        torch_readers.guard()


def _activate() -> Context:
    """Find the upstream, select the device, redirect torch, and let upstream's adaptors record patches."""
    from megatron_npu import adaptors, standins, upstream
    from megatron_npu.ops import dispatch
    from megatron_npu.replicas import ReplicasDifferError

    one_line_end.arm(UsageError, DriftError, PinError, ReplicasDifferError, LoaderWorkerError)
    settings.check()
    stacks.print_on_signal()
    found = upstream.find()
    found.require_supported()
    stock_tools.refuse(Path(getattr(sys.modules["__main__"], "__file__", None) or ""))
    device = _redirect_torch()
    if found.name.startswith("megatron_deepspeed"):
        deepspeed_device.choose(device.name)
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
    banner.prepare(announce)
    return Context(
        upstream=found.name,
        version=found.version,
        device=device.name,
        pins=Pins.load(pins_directory(), found.name, found.version),
        drift=settings.DRIFT.get(),
    )
