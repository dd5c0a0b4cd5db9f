"""Define the record of a patch: its target, origin, devices, versions and reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron_npu.patching.versions import admits

ALL_DEVICES: tuple[str, ...] = ("npu", "cuda", "cpu")
REPLACEMENTS = {"replace", "constant"}  # the kinds of which a target can have but one
CALLERS = {"around", "wrap"}  # those that lie around what was there


class NotAsked(str):
    """The reason why a patch is not applied although its device and version match: its setting is off."""

    __slots__ = ()


@dataclass(frozen=True)
class Patch:
    """One change to one symbol of upstream. Adaptors create it with the decorators of ``registry``.

    Attributes:
        target: ``package.module:Qual.name``.
        kind: ``replace`` (``make`` is the new object), ``around`` (``make`` is called with the original and
            the arguments), ``wrap`` (``make`` receives the original and returns the new object), ``constant``
            (``make`` is the new value) or ``watch`` (nothing is changed, and only the pin is compared).
        make: see ``kind``.
        devices: the devices to which the patch applies.
        upstream: the upstream to which the patch applies; empty means any.
        versions: a PEP 440 specifier of upstream versions; empty means all.
        why: the reason for the patch.
        origin: the adaptor module that recorded the patch, with its function if that is defined there.
        until: when the patch may be removed; empty means never.
        upstream_bug: whether the patch fixes an upstream bug on all devices.
        early: whether the patch must be applied before other modules use the target (such as a decorator), so
            that applying it late fails.
        condition: called when the module is patched; if it returns a string, that is the reason to skip the
            patch.
        order: the order among patches that call the original: a patch with a higher value is further outside.
        where: ``file:line`` of the record.
        nth: the number of earlier records at the same place with the same text, as in a loop.
        run: the number of the adaptor's import, which increases when the adaptor is imported again.
    """

    target: str
    kind: str
    make: Any
    devices: tuple[str, ...]
    why: str
    origin: str
    upstream: str = ""
    versions: str = ""
    until: str = ""
    upstream_bug: bool = False
    early: bool = False
    condition: Callable[[], str | None] | None = None
    order: int = 0
    where: str = ""
    nth: int = 0
    run: Any = field(default=None, compare=False, repr=False)

    @property
    def module(self) -> str:
        """The dotted name of the module that contains the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The dotted name of the target within its module."""
        return self.target.partition(":")[2]

    @property
    def file(self) -> str:
        """The source file that contains the patch record."""
        return self.where.rpartition(":")[0]

    @property
    def ours(self) -> str:
        """The location ``file:line`` of the patch record.

        The path starts at its top-level package.
        """
        file, colon, line = self.where.rpartition(":")
        return f"{_from_package(file)}{colon}{line}"

    @property
    def key(self) -> tuple[object, ...]:
        """A unique key of the patch, which stays the same when its adaptor is imported again."""
        return (*likeness(self), self.nth)

    def is_for(self, upstream: str, version: str) -> bool:
        """Return True if the patch is meant for this version of ``upstream``."""
        return (not self.upstream or self.upstream == upstream) and admits(self.versions, version)

    def reason_to_skip(self, device: str) -> str | None:
        """Return the reason why the patch is skipped on this device, or None if it is applied."""
        reason = self.condition() if self.condition else None
        if isinstance(reason, NotAsked):
            return reason
        if device not in self.devices:
            return f"for {'/'.join(self.devices)}, not {device}"
        return "upstream's own code works here" if self.kind == "watch" else reason


@cache
def _from_package(file: str) -> str:
    """Return the path of a module's file, starting with its top-level package."""
    path = Path(file)
    top = path
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top.parent).as_posix()


def likeness(patch: Patch) -> tuple[object, ...]:
    """Return values that identify a patch record if it is registered twice: location, text and name of
    ``make``.
    """
    made = patch.make if patch.kind != "constant" else None
    name = f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}"
    meant_for = patch.upstream, patch.versions, patch.devices
    return patch.target, patch.kind, patch.where, patch.why, meant_for, name
