"""Patches as records: what is changed, by whom, for which devices and versions, and why.

Recording a patch changes nothing. The engine (``engine``) applies the records of a module when that
module's body has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Unpack

ALL_DEVICES: tuple[str, ...] = ("npu", "cuda", "cpu")
REPLACEMENTS = {"replace", "constant"}  # the kinds of which a target can have but one
_CALLERS = {"around", "wrap"}  # those that lie around what was there

Make = TypeVar("Make")


class NotAsked(str):
    """Why a patch is not applied: it is for a setting that is off, which is no news to anybody."""

    __slots__ = ()


class PatchConflict(Exception):  # noqa: N818 - the name says what happened
    """Two patches of one target could be in force at the same time, and cannot be or say not in which order.

    Two replacements cannot; of two that call the original, from two files, one must lie inside the other.
    """


@dataclass(frozen=True)
class Patch:
    """One change to one upstream symbol. Adaptors do not make it; the decorators below do.

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
        upstream_bug: it cures a fault of upstream on any device.
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
        return (*_likeness(self), self.nth)

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
        return "upstream's own works here" if self.kind == "watch" else reason


@cache
def _from_package(file: str) -> str:
    """Return the path of a module's file from its top-level package on."""
    path = Path(file)
    top = path
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top.parent).as_posix()


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


class _Why(TypedDict):
    why: str


class Options(_Why, total=False):
    """What every record may say about itself; ``why`` is required.

    Attributes:
        why: the reason for the patch: what is wrong with, or missing from, upstream's own on these devices.
        until: when the patch may be removed: the upstream version or issue with the fix.
        upstream_bug: it cures a fault of upstream on any device; ``until`` is required then.
        devices: the devices it is for (default: all).
        versions: PEP 440 specifier of upstream versions, such as ``">=0.13,<0.15"`` (default: all).
        early: importers use the target while they are imported (a decorator, say): applied late, it fails.
        condition: called with no argument when the module is patched; a returned text is the reason to skip.
        order: of what calls the original, where another file patches the target too: the higher, the further
            out (default: 0). Those of one file lie as they stand there, the last outermost.
        upstream: the upstream it is for (default: that of the registry or recorder; empty means any).
    """

    until: str
    upstream_bug: bool
    devices: Iterable[str]
    versions: str
    early: bool
    condition: Callable[[], str | None] | None
    order: int
    upstream: str


class _Decorators:
    """How patches are recorded: by decorating what takes upstream's place."""

    upstream: str = ""

    def add(self, patch: Patch) -> None:
        raise NotImplementedError

    def replace(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated function or class as the new ``target``.

        For a body that is wrong on these devices as a whole. A plain function takes the place of a static or
        class method inside the same descriptor, and the place of a property as its getter. ::

            @replace("megatron.core.transformer.torch_norm:L2Norm.forward", why="five passes over its input")
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return norm.rms_norm(x, x.new_ones(x.size(-1)), self.eps)

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns what it is given.

        Raises:
            PatchConflict: another replacement of ``target`` could be in force at the same time.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("replace", target, options, sys._getframe(1))

    def around(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated function to be called in place of ``target``, with the original first.

        For what is done before or after the original, or in some cases only. It calls ``original`` when and
        if it likes, and survives a change of upstream's body, which a replacement does not. Name, signature
        and docstring stay upstream's. ::

            @around("megatron.training.arguments:add_megatron_arguments", why="the fused attention's flags")
            def add_flags(original, parser):
                parser = original(parser)
                attention_flags.add_attention_flags(parser)
                return parser

            @around("megatron.core.transformer.torch_norm:L2Norm.forward", why="...")
            def forward(original, self, x):  # a method: self comes after the original
                return original(self, x.float()).type_as(x)

        The original of a static or class method is its function (so a class method passes ``cls`` on), that
        of a property its getter. Several of one target stack on top of a replacement: those of one file in
        their order there, the last outermost; those of several files by ``order``, the highest outermost. A
        class takes ``wrap`` instead.

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns what it is given.

        Raises:
            PatchConflict: another file's patch of ``target`` has the same ``order``.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("around", target, options, sys._getframe(1))

    def wrap(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated factory: it gets the original and returns the new object.

        For what ``around`` cannot say: a class made from upstream's class, or work that is done once, when
        the module is patched. It stacks as ``around`` does. ::

            @wrap("megatron.core.transformer.torch_norm:L2Norm", why="...")
            def with_fused_forward(original: type) -> type:
                class L2Norm(original):
                    ...
                return L2Norm

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns what it is given.

        Raises:
            PatchConflict: another file's patch of ``target`` has the same ``order``.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("wrap", target, options, sys._getframe(1))

    def constant(self, target: str, value: Any, **options: Unpack[Options]) -> None:
        """Record ``value`` as the new value of the module constant or class attribute ``target``.

        Args:
            target: ``package.module:Qual.name``.
            value: what it becomes.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Raises:
            PatchConflict: another replacement of ``target`` could be in force at the same time.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        self._decorator("constant", target, options, sys._getframe(1))(value)

    def watch(self, target: str, **options: Unpack[Options]) -> None:
        """Record that ``target`` runs as upstream wrote it, although one may expect a patch.

        The ledger shows it as skipped. It is pinned as the patches are: when upstream changes the function,
        ``megatron-npu check`` says so, and ``why`` lets a reader judge whether the reason still holds.

        Args:
            target: ``package.module:Qual.name``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Raises:
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        self._decorator("watch", target, options, sys._getframe(1))(None)

    def _decorator(
        self, kind: str, target: str, options: Options, caller: FrameType
    ) -> Callable[[Make], Make]:
        fields: dict[str, Any] = {"upstream": self.upstream, **options}
        fields["devices"] = tuple(fields.get("devices", ALL_DEVICES))
        asking = caller.f_globals.get("__name__", "?")  # the adaptor, whoever made the function
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        run = caller.f_globals.get("__spec__") or caller.f_globals

        def decorate(make: Make) -> Make:
            name = getattr(make, "__qualname__", "") if getattr(make, "__module__", "") == asking else ""
            origin = f"{asking}.{name}" if name and kind != "constant" else asking
            record = Patch(target=target, kind=kind, make=make, origin=origin, where=where, run=run, **fields)
            self.add(record)
            return make

        return decorate


@dataclass
class Recorder(_Decorators):
    """The decorators of a registry with ``upstream`` filled in; adaptors use those of their upstream.

    Args:
        registry: where the patches go.
        upstream: the upstream of patches that do not name one.
    """

    registry: Registry
    upstream: str

    def add(self, patch: Patch) -> None:
        """Record ``patch`` in the registry."""
        self.registry.add(patch)


@dataclass
class Registry(_Decorators):
    """The recorded patches, in order of registration.

    Args:
        upstream: the upstream of patches that do not name one; empty means any.
    """

    upstream: str = ""
    patches: list[Patch] = field(default_factory=list)

    def add(self, patch: Patch) -> None:
        """Record ``patch``. The same record again (its adaptor was imported again) takes its own place.

        Raises:
            PatchConflict: another patch of the target could be in force at the same time, and the two do not
                go together.
            ValueError: the record is malformed.
        """
        _validate(patch)
        alike = 0
        for position, other in enumerate(self.patches):
            if other.target != patch.target or _likeness(other) != _likeness(patch):
                continue
            if other.make is patch.make or other.run is not patch.run:
                self.patches[position] = replaced(patch, nth=other.nth)
                return
            alike += 1
        for other in self.patches:
            if other.target == patch.target:
                _refuse_conflict(other, patch)
        self.patches.append(replaced(patch, nth=alike))

    def for_module(self, name: str) -> list[Patch]:
        """Return the patches of the module ``name``, in order of registration."""
        return [patch for patch in self.patches if patch.target.startswith(f"{name}:")]

    def modules(self) -> list[str]:
        """Return the names of the modules that have patches, in order of registration."""
        return list(dict.fromkeys(patch.module for patch in self.patches))

    def keep(self, wanted: Callable[[Patch], bool]) -> None:
        """Forget the patches that are not wanted, so that upstream's own code can be compared with ours."""
        self.patches = [patch for patch in self.patches if wanted(patch)]


def in_order(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches of one target from the inside out: a replacement, then what calls the original."""
    return sorted(patches, key=lambda patch: (patch.kind not in REPLACEMENTS, patch.order))


def _likeness(patch: Patch) -> tuple[object, ...]:
    """Return what a record and the same made again have in common: place, words, the name of ``make``."""
    made = patch.make if patch.kind != "constant" else None
    name = f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}"
    meant_for = patch.upstream, patch.versions, patch.devices
    return patch.target, patch.kind, patch.where, patch.why, meant_for, name


def _validate(patch: Patch) -> None:
    names = (patch.module, patch.qualname)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(f"{patch.origin}: target {patch.target!r} is not package.module:Qual.name")
    unknown = set(patch.devices) - set(ALL_DEVICES)
    if unknown or not patch.devices:
        raise ValueError(f"{patch.origin}: devices {patch.devices} are not a choice of {ALL_DEVICES}")
    if not patch.why.strip():
        raise ValueError(f"{patch.origin}: the patch of {patch.target} says no reason (why)")
    if patch.order and patch.kind not in _CALLERS:
        raise ValueError(f"{patch.origin}: {patch.kind} of {patch.target} has no order: it calls no original")
    if patch.upstream_bug and not patch.until.strip():
        raise ValueError(f"{patch.origin}: {patch.target} cures an upstream bug: until when (until)?")
    if patch.versions:
        from packaging.specifiers import SpecifierSet  # InvalidSpecifier is a ValueError

        SpecifierSet(patch.versions)


def _refuse_conflict(first: Patch, second: Patch) -> None:
    """Refuse two replacements of one target, and two files' patches that call the original in no order."""
    if not _meet(first, second):
        return
    both = f"{first.origin} ({first.where}) and by {second.origin} ({second.where})"
    if {first.kind, second.kind} <= REPLACEMENTS:
        raise PatchConflict(f"{first.target} is replaced twice: by {both}")
    if {first.kind, second.kind} <= _CALLERS and first.order == second.order and first.file != second.file:
        raise PatchConflict(
            f"{first.target} is patched from two files: by {both}. Say which lies inside: give the outer one "
            f"order={first.order + 1}"
        )


def _meet(first: Patch, second: Patch) -> bool:
    """Return whether two patches of one target could be in force at the same time."""
    if not set(first.devices) & set(second.devices):
        return False
    if first.upstream and second.upstream and first.upstream != second.upstream:
        return False
    return versions_overlap(first.versions, second.versions)


registry = Registry()
replace, around, wrap = registry.replace, registry.around, registry.wrap
constant, watch = registry.constant, registry.watch
