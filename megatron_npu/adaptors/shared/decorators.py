"""Provide the decorators with which adaptors record their patches."""

from __future__ import annotations

from contextvars import ContextVar

from megatron_npu.base import settings
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.patching.patch import NotAsked, Patch
from megatron_npu.patching.registry import Recorder, registry

WITHOUT_CUDA = ("npu", "cpu")

OURS = ContextVar("ours", default=False)
"""Whether a program of this project trains, rather than a script of somebody else's."""

# The end of a ``why`` whose gain nobody has measured on an NPU.
LAUNCHES_COUNTED = "; the launches were counted on the simulated NPU, and no time was measured on an NPU"
MEMORY_COUNTED = "; the memory was counted on the simulated NPU and not measured on an NPU"


def recorder(upstream: str) -> Recorder:
    """Return the decorators of ``patching``, bound to ``upstream``."""
    return Recorder(registry, upstream)


def installed(*packages: str) -> str | None:
    """Return the first package in ``packages`` that is installed, or None.

    An installed package makes a patch for its absence unnecessary.
    """
    found = (f"{package} is installed" for package in packages if is_installed(package))
    return next(found, None)


def upstream_compiles() -> str | None:
    """Return the reason for skipping a patch of code that upstream compiles on CUDA, or None.

    Such a patch is not needed if none of our kernels will run.
    """
    from megatron_npu import devices
    from megatron_npu.ops import dispatch

    if devices.current().name != "cuda":
        return None
    reason = dispatch.without_kernels()
    return None if reason is None else f"{reason}: on cuda upstream compiles the function"


def backports_not_wanted() -> str | None:
    """Return the reason for skipping a fix of upstream's wrong numbers, or None if the user requests the
    fix.
    """
    variable = settings.BACKPORT
    if variable.enabled():
        return None
    return NotAsked(f"the wrong results are upstream's own; {variable.name}=1 fixes them")


def own_backports_not_wanted() -> str | None:
    """Return the reason for skipping a fix that this project's own training programs always apply, or
    None.
    """
    return None if OURS.get() else backports_not_wanted()


def is_backport(patch: Patch) -> bool:
    """Return True if ``patch`` is applied only when fixes for wrong numbers are requested."""
    return patch.condition in (backports_not_wanted, own_backports_not_wanted)


def is_cured_in_own_programs(patch: Patch) -> bool:
    """Return True if ``patch`` fixes wrong numbers and is always applied in this project's own training
    programs.
    """
    return patch.condition is own_backports_not_wanted
