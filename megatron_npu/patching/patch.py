"""The record of a patch: its target, origin, devices, versions and reason."""

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
    """Why a patch is not applied: it is for a setting that is off, which is no news to anybody."""

    __slots__ = ()


@dataclass(frozen=True)
class Patch:
    """One change to one upstream symbol. Adaptors do not make it; the decorators of ``registry`` do.

    Attributes:
        target: ``package.module:Qual.name``.
        kind: ``replace`` (``make`` is the new object), ``around`` (``make`` is called with the original and
            the arguments), ``wrap`` (``make`` gets the original and returns the new object), ``constant``
            (``make`` is the new value) or ``watch`` (nothing is changed, the pin is compared).
        make: see ``kind``.
        devices: the devices it is for.
        upstream: the upstream it is for; empty means any.
        versions: PEP 440 specifier of upstream versions; empty means all.
        why: the reason for the patch.
        origin: the module of the adaptor that asked for it, and its function if it is one of that module.
        until: when it may be removed; empty means never.
        upstream_bug: it fixes a fault of upstream on any device.
        early: it must be in place before importers run (a decorator, say), so applying it late fails.
        condition: asked when the module is patched; a returned text is the reason to skip.
        order: among those that call the original: the higher, the further out.
        where: ``file:line`` of the record.
        nth: how many records before it were made at the same place with the same words: a loop may make
            several.
        run: the run of the adaptor's body that made the record; a body that is imported again is another.
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
        """The dotted name of the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The dotted name of the target inside its module."""
        return self.target.partition(":")[2]

    @property
    def file(self) -> str:
        """The file of the record."""
        return self.where.rpartition(":")[0]

    @property
    def ours(self) -> str:
        """``file:line`` of the record, as it is told: the file's path begins with its top-level package."""
        file, colon, line = self.where.rpartition(":")
        return f"{_from_package(file)}{colon}{line}"

    @property
    def key(self) -> tuple[object, ...]:
        """What tells the patch from every other one, and is the same when its adaptor is imported again."""
        return (*likeness(self), self.nth)

    def is_for(self, upstream: str, version: str) -> bool:
        """Return whether the patch is meant for this version of ``upstream``."""
        return (not self.upstream or self.upstream == upstream) and admits(self.versions, version)

    def reason_to_skip(self, device: str) -> str | None:
        """Return why the patch is not applied on this device, or None."""
        reason = self.condition() if self.condition else None
        if isinstance(reason, NotAsked):
            return reason
        if device not in self.devices:
            return f"for {'/'.join(self.devices)}, not {device}"
        return "upstream's own code works here" if self.kind == "watch" else reason


@cache
def _from_package(file: str) -> str:
    """Return the path of a module's file from its top-level package on."""
    path = Path(file)
    top = path
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top.parent).as_posix()


def likeness(patch: Patch) -> tuple[object, ...]:
    """Return what a record and the same made again have in common: place, words, the name of ``make``."""
    made = patch.make if patch.kind != "constant" else None
    name = f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}"
    meant_for = patch.upstream, patch.versions, patch.devices
    return patch.target, patch.kind, patch.where, patch.why, meant_for, name
