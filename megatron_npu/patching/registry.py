"""Define the patch registry, and the decorators that record patches in it.

Recording a patch changes nothing. The engine (``engine``) applies the patches of a module after its
execution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from megatron_npu.patching.patch import ALL_DEVICES, CALLERS, REPLACEMENTS, Patch, likeness
from megatron_npu.patching.versions import versions_overlap

if TYPE_CHECKING:
    from typing_extensions import Unpack

Make = TypeVar("Make")


class PatchConflict(Exception):  # noqa: N818 - the name says what happened
    """Raised if two patches of one target could both be in effect but cannot be combined or ordered.

    Two replacements cannot be combined. If two patches in different files call the original, one of them must
    be inside the other.
    """


class _Why(TypedDict):
    why: str


class Options(_Why, total=False):
    """The options of a patch record.

    Only ``why`` is required.

    Attributes:
        why: the reason: what is wrong with upstream's own code, or missing from it, on these devices.
        until: when the patch may be removed: the upstream version or issue with the fix.
        upstream_bug: whether the patch fixes an upstream bug on all devices; requires ``until``.
        devices: the devices to which the patch applies (default: all).
        versions: a PEP 440 specifier of upstream versions, such as ``">=0.13,<0.15"`` (default: all).
        early: whether other modules use the target while they are imported (such as a decorator), so that
            applying the patch late fails.
        condition: called without arguments when the module is patched; if it returns a string, that is the
            reason to skip the patch.
        order: the order among patches of the target in different files that call the original: a patch with a
            higher value is further outside (default: 0). Patches in one file are in the order of the file,
            with the last one outermost.
        upstream: the upstream to which the patch applies (default: that of the registry or recorder; empty
            means any).
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
    """Decorators that record patches.

    The decorated code replaces or wraps an upstream symbol.
    """

    upstream: str = ""

    def add(self, patch: Patch) -> None:
        raise NotImplementedError

    def replace(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated function or class as the replacement for ``target``.

        Use it if upstream's whole body is wrong on these devices. A plain function that replaces a static or
        class method is put into the same descriptor; one that replaces a property becomes its getter. ::

            @replace("megatron.core.transformer.torch_norm:L2Norm.forward", why="five passes over its input")
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return norm.rms_norm(x, x.new_ones(x.size(-1)), self.eps)

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns its argument unchanged.

        Raises:
            PatchConflict: another replacement of ``target`` could be in effect at the same time.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("replace", target, options, sys._getframe(1))

    def around(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated function as one that is called instead of ``target``.

        Its first argument is the original.

        Use it for code that runs before or after the original, or only in some cases. The function decides
        when and whether to call ``original``. Unlike a replacement, it keeps working if upstream changes the
        body. The name, signature and docstring remain those of upstream. ::

            @around("megatron.training.arguments:add_megatron_arguments", why="the fused attention's flags")
            def add_flags(original, parser):
                parser = original(parser)
                attention_flags.add_attention_flags(parser)
                return parser

            @around("megatron.core.transformer.torch_norm:L2Norm.forward", why="...")
            def forward(original, self, x):  # a method: self comes after the original
                return original(self, x.float()).type_as(x)

        The original of a static or class method is its function (so a class method passes ``cls`` on), and
        that of a property is its getter. Several patches of one target are applied on top of a replacement:
        those in one file in the order of the file, with the last one outermost; those in several files by
        ``order``, with the highest outermost. For a class, use ``wrap`` instead.

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns its argument unchanged.

        Raises:
            PatchConflict: a patch of ``target`` in another file has the same ``order``.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("around", target, options, sys._getframe(1))

    def wrap(self, target: str, **options: Unpack[Options]) -> Callable[[Make], Make]:
        """Record the decorated factory as one that creates a wrapper of ``target``.

        The factory receives the original and returns the new object.

        Use it for what ``around`` cannot express: a class derived from upstream's class, or work that is done
        once, when the module is patched. Several patches of one target are combined as with ``around``. ::

            @wrap("megatron.core.transformer.torch_norm:L2Norm", why="...")
            def with_fused_forward(original: type) -> type:
                class L2Norm(original):
                    ...
                return L2Norm

        Args:
            target: ``package.module:Qual.name``; a method is ``Class.method``.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Returns:
            A decorator that returns its argument unchanged.

        Raises:
            PatchConflict: a patch of ``target`` in another file has the same ``order``.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        return self._decorator("wrap", target, options, sys._getframe(1))

    def constant(self, target: str, value: Any, **options: Unpack[Options]) -> None:
        """Record ``value`` as the new value of the module constant or class attribute ``target``.

        Args:
            target: ``package.module:Qual.name``.
            value: the new value.
            options: ``why`` (required), ``devices``, ``versions``, ``until`` and others: see ``Options``.

        Raises:
            PatchConflict: another replacement of ``target`` could be in effect at the same time.
            ValueError: ``target`` or an option is malformed, or ``why`` is empty.
        """
        self._decorator("constant", target, options, sys._getframe(1))(value)

    def watch(self, target: str, **options: Unpack[Options]) -> None:
        """Record that ``target`` is deliberately not patched, although a patch might be expected.

        The ledger lists it as skipped. The symbol is pinned like a patch: when upstream changes the function,
        ``megatron-npu check`` reports the change, and ``why`` allows a reader to judge whether the reason
        still holds.

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
    """The decorators of a registry for the adaptors of one upstream.

    Args:
        registry: where the patches are recorded.
        upstream: the default upstream of patches.
    """

    registry: Registry
    upstream: str

    def add(self, patch: Patch) -> None:
        """Record a patch in the registry."""
        self.registry.add(patch)


@dataclass
class Registry(_Decorators):
    """The recorded patches, in the order in which they were registered.

    Args:
        upstream: the default upstream of patches; empty means any.
    """

    upstream: str = ""
    patches: list[Patch] = field(default_factory=list)

    def add(self, patch: Patch) -> None:
        """Record a patch.

        If its adaptor is imported again, the new record replaces the old one.

        Raises:
            PatchConflict: another patch of the target could be in effect too, and the two cannot be combined.
            ValueError: the record is malformed.
        """
        _validate(patch)
        alike = 0
        for position, other in enumerate(self.patches):
            if other.target != patch.target or likeness(other) != likeness(patch):
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
        """Return the patches of the module ``name``, in the order in which they were registered."""
        prefix = f"{name}:"
        return [patch for patch in self.patches if patch.target.startswith(prefix)]

    def modules(self) -> list[str]:
        """Return the names of all modules that have patches, in the order of registration."""
        return list(dict.fromkeys(patch.module for patch in self.patches))

    def keep(self, wanted: Callable[[Patch], bool]) -> None:
        """Remove all patches for which ``wanted`` returns False.

        This makes it possible to compare upstream's own code with ours.
        """
        self.patches = [patch for patch in self.patches if wanted(patch)]


def in_order(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches of a target in the order in which they are applied: the replacement, then the
    wrappers.
    """
    return sorted(patches, key=lambda patch: (patch.kind not in REPLACEMENTS, patch.order))


def _validate(patch: Patch) -> None:
    names = (patch.module, patch.qualname)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError(
            f"{patch.origin}: target {patch.target!r} does not have the form package.module:Qual.name"
        )
    unknown = set(patch.devices) - set(ALL_DEVICES)
    if unknown or not patch.devices:
        raise ValueError(
            f"{patch.origin}: devices must be a subset of {ALL_DEVICES}, but got {patch.devices}"
        )
    if not patch.why.strip():
        raise ValueError(f"{patch.origin}: the patch of {patch.target} must give a reason (why)")
    if patch.order and patch.kind not in CALLERS:
        raise ValueError(
            f"{patch.origin}: the {patch.kind} patch of {patch.target} must not have an order, because it "
            "does not call the original"
        )
    if patch.upstream_bug and not patch.until.strip():
        raise ValueError(
            f"{patch.origin}: the fix for an upstream bug in {patch.target} must name the version that "
            "fixes it (until)"
        )
    if patch.versions:
        from packaging.specifiers import SpecifierSet  # InvalidSpecifier is a ValueError

        SpecifierSet(patch.versions)


def _refuse_conflict(first: Patch, second: Patch) -> None:
    """Reject two replacements of one target, and wrappers from two files whose order is not defined."""
    if not _meet(first, second):
        return
    both = f"{first.origin} ({first.where}) and by {second.origin} ({second.where})"
    if {first.kind, second.kind} <= REPLACEMENTS:
        raise PatchConflict(f"{first.target} is replaced twice: by {both}")
    if {first.kind, second.kind} <= CALLERS and first.order == second.order and first.file != second.file:
        raise PatchConflict(
            f"{first.target} is patched by {both}, but the order of the two is not defined. Set "
            f"order={first.order + 1} on the outer patch"
        )


def _meet(first: Patch, second: Patch) -> bool:
    """Return True if two patches of one target could be in effect at the same time."""
    if not set(first.devices) & set(second.devices):
        return False
    if first.upstream and second.upstream and first.upstream != second.upstream:
        return False
    return versions_overlap(first.versions, second.versions)


registry = Registry()
replace, around, wrap = registry.replace, registry.around, registry.wrap
constant, watch = registry.constant, registry.watch
