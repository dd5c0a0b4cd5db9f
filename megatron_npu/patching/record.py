"""Patches as records: what is changed, by whom, for which devices and versions, and why.

Recording a patch changes nothing. The engine (``hooks``) applies the records of a module when that
module's body has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

ALL_DEVICES: tuple[str, ...] = ("npu", "cuda", "cpu")

Make = TypeVar("Make", bound=Callable[..., Any])


class PatchConflict(Exception):  # noqa: N818 - the name says what happened
    """Two replacements of one target could be in force at once."""


@dataclass(frozen=True)
class Patch:
    """One change to one upstream symbol.

    Attributes:
        target: ``package.module:Qual.name``.
        kind: ``replace`` (``make`` is the new object), ``wrap`` (``make`` gets the original and returns
            the new object) or ``constant`` (``make`` is the new value).
        make: see ``kind``.
        devices: the devices it is for.
        host: the host it is for; empty means any.
        versions: PEP 440 specifier of host versions; empty means all.
        why: the reason for the patch.
        until: when it may be removed.
        origin: ``module.qualname`` of the adaptor function.
        early: it must be in place before importers run (a decorator, say), so applying it late fails.
        condition: asked when the module is patched; a returned text is the reason to skip.
        where: ``file:line`` of the record; tells a repeated registration from a second one.
    """

    target: str
    kind: str
    make: Any
    devices: tuple[str, ...]
    host: str
    versions: str
    why: str
    until: str
    origin: str
    early: bool = False
    condition: Callable[[], str | None] | None = None
    where: str = ""

    @property
    def module(self) -> str:
        """The dotted name of the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The dotted name of the target inside its module."""
        return self.target.partition(":")[2]

    def is_for(self, host: str, version: str) -> bool:
        """Return whether the patch is meant for this version of ``host``."""
        return (not self.host or self.host == host) and admits(self.versions, version)

    def reason_to_skip(self, device: str) -> str | None:
        """Return why the patch is not applied on this device, or None."""
        if device not in self.devices:
            return f"for {'/'.join(self.devices)}, not {device}"
        return self.condition() if self.condition else None


def admits(versions: str, version: str) -> bool:
    """Return whether the specifier ``versions`` admits ``version``; an empty one admits everything.

    A version that is not PEP 440 (a commit) is admitted only by an empty specifier.
    """
    if not versions:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def versions_overlap(first: str, second: str) -> bool:
    """Return whether some version satisfies both specifiers.

    A specifier set is an interval (with holes from ``!=``), so a common version, if there is one, can be
    found at zero, at a version that one of the two names, or just above such a version.
    """
    if not first or not second or first == second:
        return True
    from packaging.specifiers import SpecifierSet

    both = SpecifierSet(first) & SpecifierSet(second)
    named = [specifier.version.removesuffix(".*") for specifier in both]
    candidates = ["0", *named, *(f"{version.partition('+')[0]}.0.0.0.1" for version in named)]
    return any(_contains(both, candidate) for candidate in candidates)


def _contains(specifiers: Any, version: str) -> bool:
    from packaging.version import InvalidVersion

    try:
        return specifiers.contains(version, prereleases=True)
    except InvalidVersion:  # "just above" a pre-release has no spelling
        return False


@dataclass
class Registry:
    """The recorded patches, in order of registration.

    Args:
        host: the host of patches that do not name one; empty means any.
    """

    host: str = ""
    patches: list[Patch] = field(default_factory=list)

    def replace(
        self,
        target: str,
        *,
        why: str,
        until: str = "",
        devices: Iterable[str] = ALL_DEVICES,
        versions: str = "",
        early: bool = False,
        condition: Callable[[], str | None] | None = None,
        host: str | None = None,
    ) -> Callable[[Make], Make]:
        """Record the decorated function or class as the new ``target``.

        A plain function takes the place of a static or class method inside the same descriptor, and the
        place of a property as its getter.

        Raises:
            PatchConflict: another replacement of ``target`` could be in force at the same time.
            ValueError: ``target``, ``devices`` or ``versions`` is malformed, or ``why`` is empty.
        """
        return self._decorator("replace", target, why, until, devices, versions, early, condition, host)

    def wrap(
        self,
        target: str,
        *,
        why: str,
        until: str = "",
        devices: Iterable[str] = ALL_DEVICES,
        versions: str = "",
        early: bool = False,
        condition: Callable[[], str | None] | None = None,
        host: str | None = None,
    ) -> Callable[[Make], Make]:
        """Record the decorated factory: it gets the original and returns the new object.

        The original of a static or class method is its function, that of a property its getter; what the
        factory returns goes back into the same descriptor. Wraps of one target stack in order of
        registration, on top of a replacement.

        Raises:
            ValueError: ``target``, ``devices`` or ``versions`` is malformed, or ``why`` is empty.
        """
        return self._decorator("wrap", target, why, until, devices, versions, early, condition, host)

    def constant(
        self,
        target: str,
        value: Any,
        *,
        why: str,
        until: str = "",
        devices: Iterable[str] = ALL_DEVICES,
        versions: str = "",
        condition: Callable[[], str | None] | None = None,
        host: str | None = None,
    ) -> None:
        """Record ``value`` as the new value of the module constant or class attribute ``target``.

        Raises:
            PatchConflict: another replacement of ``target`` could be in force at the same time.
            ValueError: ``target``, ``devices`` or ``versions`` is malformed, or ``why`` is empty.
        """
        caller = sys._getframe(1)
        origin = caller.f_globals.get("__name__", "?")
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        host = self.host if host is None else host
        fields = (target, "constant", value, tuple(devices), host, versions, why, until, origin)
        self.add(Patch(*fields, condition=condition, where=where))

    def _decorator(
        self,
        kind: str,
        target: str,
        why: str,
        until: str,
        devices: Iterable[str],
        versions: str,
        early: bool,
        condition: Callable[[], str | None] | None,
        host: str | None,
    ) -> Callable[[Make], Make]:
        host = self.host if host is None else host
        devices = tuple(devices)

        def record(make: Make) -> Make:
            origin = f"{make.__module__}.{make.__qualname__}"
            fields = (target, kind, make, devices, host, versions, why, until, origin)
            self.add(Patch(*fields, early=early, condition=condition, where=_where(make)))
            return make

        return record

    def add(self, patch: Patch) -> None:
        """Record ``patch``. The same record again (its adaptor was imported anew) takes its own place.

        Raises:
            PatchConflict: another replacement of the target could be in force at the same time.
            ValueError: the record is malformed.
        """
        _validate(patch)
        for position, other in enumerate(self.patches):
            if other.target != patch.target:
                continue
            if (other.origin, other.where, other.kind) == (patch.origin, patch.where, patch.kind):
                self.patches[position] = patch
                return
            _refuse_conflict(other, patch)
        self.patches.append(patch)

    def for_module(self, name: str) -> list[Patch]:
        """Return the patches of the module ``name``, in order of registration."""
        return [patch for patch in self.patches if patch.module == name]

    def modules(self) -> list[str]:
        """Return the names of the modules that have patches, in order of registration."""
        return list(dict.fromkeys(patch.module for patch in self.patches))

    def keep(self, wanted: Callable[[Patch], bool]) -> None:
        """Forget the patches that are not wanted, so that upstream's own code can be compared with ours."""
        self.patches = [patch for patch in self.patches if wanted(patch)]


def _validate(patch: Patch) -> None:
    names = (patch.module, patch.qualname)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(f"{patch.origin}: target {patch.target!r} is not package.module:Qual.name")
    unknown = set(patch.devices) - set(ALL_DEVICES)
    if unknown or not patch.devices:
        raise ValueError(f"{patch.origin}: devices {patch.devices} are not a choice of {ALL_DEVICES}")
    if not patch.why.strip():
        raise ValueError(f"{patch.origin}: the patch of {patch.target} says no reason (why)")
    if patch.versions:
        from packaging.specifiers import SpecifierSet  # InvalidSpecifier is a ValueError

        SpecifierSet(patch.versions)


def _refuse_conflict(first: Patch, second: Patch) -> None:
    if "wrap" in (first.kind, second.kind) or not set(first.devices) & set(second.devices):
        return
    if first.host and second.host and first.host != second.host:
        return
    if versions_overlap(first.versions, second.versions):
        raise PatchConflict(
            f"{first.target} is replaced twice: by {first.origin} ({first.where}) "
            f"and by {second.origin} ({second.where})"
        )


def _where(make: Any) -> str:
    code = getattr(make, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else make.__module__


registry = Registry()
replace = registry.replace
wrap = registry.wrap
constant = registry.constant
