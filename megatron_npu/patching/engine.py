"""The engine: patches an upstream's modules when their bodies have run, and can undo all of it.

A finder in front of ``sys.meta_path`` lets the other finders find a module and hooks the loader that they
return. So nothing happens when somebody merely asks whether a package exists.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_npu.patching.attribute_patch import (
    MISSING,
    Change,
    bare,
    find_slot,
    holders,
    is_shared_by_identity,
    is_under,
    new_value,
)
from megatron_npu.patching.captured_references import CapturedChange, Held, captures
from megatron_npu.patching.ledger import Ledger, Row
from megatron_npu.patching.pins import Pins, Source, Verdict, compare
from megatron_npu.patching.registry import REPLACEMENTS, Patch, Registry

logger = logging.getLogger(__name__)

CHECK_COMMAND = "megatron-npu check --megatron PATH"


class DriftError(Exception):
    """Upstream is not what a patch was written against."""


class PatchError(Exception):
    """A patch cannot be applied through a fault of its own."""


@dataclass(frozen=True)
class Context:
    """What is known once the upstream is found.

    Attributes:
        upstream, version: name and version of upstream.
        device: name of the device.
        pins: the pins of upstream; None switches the drift check off.
        drift: ``error`` raises ``DriftError``; ``warn`` logs and applies what can be applied.
    """

    upstream: str
    version: str
    device: str
    pins: Pins | None = None
    drift: str = "error"


class Engine:
    """Applies the patches of a registry to the modules under some prefixes.

    Args:
        registry: the patches; ``on_first`` may still add to it.
        prefixes: top-level names of upstream's modules.
        on_first: called once, before the first body under a prefix runs. If it raises, that import fails,
            and the next one calls it again.
    """

    def __init__(
        self, registry: Registry, *, prefixes: tuple[str, ...], on_first: Callable[[], Context]
    ) -> None:
        self.registry, self.prefixes, self._on_first = registry, prefixes, on_first
        self._finder = _Finder(self)
        self._ledger = Ledger()
        self._context: Context | None = None
        self._activating = False
        self._lock = threading.RLock()  # held while on_first runs
        # Held while a change is made and noted, or undone and forgotten: the list keeps their order. It comes
        # after every import lock: a thread patches with the lock of its module held, but what is done under
        # this one imports nothing, so who has it waits for no other thread.
        self._changing = threading.RLock()
        self._running: set[int] = set()  # ids of the modules whose bodies run under our hook
        self._patched: dict[str, ModuleType] = {}
        self._changes: list[Change] = []
        self._captured: list[tuple[str, Any, Any]] = []  # (name, new, old): who took the new one by value
        self._incomplete = False  # a module that was there before could not be patched
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_lock)

    def _forget_lock(self) -> None:
        # A thread that held a lock does not exist in the child.
        self._lock, self._changing, self._activating = threading.RLock(), threading.RLock(), False

    # --- switching on and off ---

    @property
    def armed(self) -> bool:
        """Whether the finder is in place."""
        return self._finder in sys.meta_path

    @property
    def context(self) -> Context | None:
        """What ``on_first`` returned; None before."""
        return self._context

    def arm(self) -> None:
        """Put the finder in front of ``sys.meta_path``; a second call changes nothing."""
        if not self.armed:
            sys.meta_path.insert(0, self._finder)

    def disarm(self) -> None:
        """Take the finder out. Patches stay; the next arming calls ``on_first`` again."""
        if self.armed:
            sys.meta_path.remove(self._finder)
        self._context = None

    def apply_loaded(self) -> None:
        """Patch the modules that were imported before the engine was armed.

        Functions and classes that other modules of upstream or the main module took by value are repaired;
        plain values, and names that the patched module itself had imported, are not. A module whose body
        is still running is patched when it ends.

        Raises:
            DriftError: see ``Context.drift``.
        """
        if not any(
            self.covers(name) and hasattr(sys.modules[name], "__file__") for name in list(sys.modules)
        ):
            return
        self._incomplete = True
        self._activate()
        for name in self.registry.modules():
            self._catch_up(name)
        self._incomplete = False

    def patch_now(self, name: str) -> None:
        """Import the module ``name`` if need be and apply those of its patches that are not applied yet.

        Raises:
            DriftError: see ``Context.drift``.
            ImportError: there is no such module.
        """
        self._activate()
        module = sys.modules.get(name) or importlib.import_module(name)
        rows = [self._ledger.row(patch) for patch in self._patches_for(name)]
        if self._patched.get(name) is module and all(row.state != "pending" for row in rows):
            return
        self._restore([change for change in self._changes.copy() if change.module is module])
        self._patch(module, late=True)

    def undo(self) -> None:
        """Restore everything that was changed, in reverse order, names taken by value included.

        A slot that somebody else has set since is left as it is, with a warning.
        """
        for change in self._restore(list(self._changes)):
            logger.warning("%s was changed by others; left as it is", change)
        self._release_captured()
        self._patched.clear()
        for row in self._ledger.rows:
            row.settle("pending", "undone" if row.state in ("applied", "drifted") else "")

    # --- the ledger ---

    @property
    def ledger(self) -> Ledger:
        """The state of every patch for this version of upstream; of every patch while that is not known."""
        context = self._context
        self._ledger.keep(
            patch
            for patch in self.registry.patches
            if context is None or patch.is_for(context.upstream, context.version)
        )
        if self.armed and self._context:
            self._report_missed()
        return self._ledger

    def _report_missed(self) -> None:
        for patch in self.registry.patches:
            module = sys.modules.get(patch.module)
            if module is None or self._is_in_hand(module) or not self._is_meant(patch):
                continue
            row = self._ledger.row(patch)
            if row.state == "pending":
                row.settle("failed", "the module was imported past the hook")

    # --- from the import to the patch ---

    def covers(self, name: str) -> bool:
        """Return whether the module ``name`` belongs to the upstream."""
        return is_under(name, self.prefixes)

    def execute(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Run the body of ``module``, then patch it. Loaders call this in place of ``exec_module``."""
        if not self.armed or id(module) in self._running:
            return run(module)
        self._running.add(id(module))
        try:
            self._activate()
            if self._incomplete:
                self.apply_loaded()
            self._forget(module)
            run(module)
            self._patch(module, late=False)
        finally:
            self._running.discard(id(module))

    def _forget(self, module: ModuleType) -> None:
        """Make ready for a body that runs again: on a reload it must find its own names, not ours."""
        self._restore([change for change in self._changes.copy() if change.owner is module])
        self._patched.pop(module.__name__, None)
        for patch in self.registry.for_module(module.__name__):
            self._ledger.row(patch).settle("pending")

    def _activate(self) -> None:
        with self._lock:
            if self._context is not None or self._activating:
                return
            self._activating = True
            try:
                self._context = self._on_first()
            finally:
                self._activating = False
        for name in self.registry.modules():  # on_first itself may have imported some
            self._catch_up(name)

    def _is_in_hand(self, module: ModuleType) -> bool:
        return id(module) in self._running or self._patched.get(module.__name__) is module

    def _catch_up(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is None or self._is_in_hand(module):
            return
        spec = module.__spec__
        if getattr(spec, "_initializing", False):
            _when_initialized(spec, lambda: self._patch_finished(module))
        else:
            self._patch(module, late=True)

    def _patch_finished(self, module: ModuleType) -> None:
        """Patch a module whose body had begun before the engine was armed, and has now ended."""
        if sys.modules.get(module.__name__) is not module or not self.armed or self._is_in_hand(module):
            return
        try:
            self._patch(module, late=False)
        except BaseException:
            del sys.modules[module.__name__]  # as the import system does for a module that fails
            raise

    def _patches_for(self, name: str) -> list[Patch]:
        return [patch for patch in self.registry.for_module(name) if self._is_meant(patch)]

    def _is_meant(self, patch: Patch) -> bool:
        return patch.is_for(self._context.upstream, self._context.version)

    def _patch(self, module: ModuleType, *, late: bool) -> None:
        context = self._context
        if context is None:  # on_first is still running; it will catch up
            return
        wanted = [
            patch for patch in self._patches_for(module.__name__) if self._is_wanted(patch, context, late)
        ]
        if not wanted:
            self._patched[module.__name__] = module
            return
        verdicts = self._check(wanted, module, context)
        made: list[Change] = []  # by this call; other threads patch other modules meanwhile
        try:
            for qualname in _deepest_first(wanted):
                group = [patch for patch in wanted if patch.qualname == qualname]
                self._apply(module, qualname, group, verdicts, late, made)
            self._repair(module, made)
        except BaseException:
            self._restore(made)
            for row in map(self._ledger.row, wanted):
                if row.state in ("applied", "drifted"):
                    row.settle("pending", "taken back: another patch of the module failed")
            raise
        self._patched[module.__name__] = module

    def _is_wanted(self, patch: Patch, context: Context, late: bool) -> bool:
        row = self._ledger.row(patch)
        reason = patch.reason_to_skip(context.device)
        if reason is not None:
            row.settle("skipped", reason)
        elif patch.early and late and row.state != "applied":
            row.settle("failed", "the module was imported before the plug-in, and importers have used it")
            logger.warning("%s: %s", patch.target, row.reason)
        else:
            return True
        return False

    # --- drift ---

    def _check(self, patches: list[Patch], module: ModuleType, context: Context) -> dict[str, Verdict]:
        """Return the verdict of each target; none without pins or without a source file.

        Raises:
            DriftError: some target has drifted too far, and ``context.drift`` is ``error``.
        """
        source = _source(module)
        if context.pins is None or source is None:
            return {}
        verdicts = [(patch, compare(patch, source, context.pins)) for patch in patches]
        failing = [(patch, verdict) for patch, verdict in verdicts if verdict.fails]
        if failing:
            message = _drift_message([verdict for _, verdict in failing], context)
            if context.drift == "error":
                for patch, verdict in failing:
                    self._ledger.row(patch).settle("failed", verdict.detail)
                raise DriftError(message)
            logger.warning("%s", message)
        return {patch.target + patch.kind: verdict for patch, verdict in verdicts}

    def _fail(self, patches: list[Patch], reason: str, cause: BaseException | None = None) -> None:
        for patch in patches:
            self._ledger.row(patch).settle("failed", reason)
        if self._context.drift == "error":
            raise PatchError(f"{patches[0].target} ({patches[0].origin}): {reason}") from cause
        logger.warning("%s (%s): %s", patches[0].target, patches[0].origin, reason)

    # --- applying and repairing ---

    def _apply(
        self,
        module: ModuleType,
        qualname: str,
        group: list[Patch],
        verdicts: dict[str, Verdict],
        late: bool,
        made: list[Change],
    ) -> None:
        """Apply all patches of one target: the replacement, then the wraps, set at once; add to ``made``."""
        slot = find_slot(module, qualname)
        verdict = verdicts.get(group[0].target + group[0].kind)
        if slot is None and verdict is not None and verdict.status != "gone":
            for patch in group:
                self._ledger.row(patch).settle(
                    "skipped", f"defined on a condition, not met ({verdict.place})"
                )
            return
        if slot is None:
            return self._fail(group, f"gone from {_file(module)}: no such name")
        value = slot.current
        try:
            for patch in sorted(group, key=lambda patch: patch.kind not in REPLACEMENTS):
                value = new_value(patch, value)
            self._make(Change(module, qualname, slot.owner, slot.name, slot.own, value), made)
        except Exception as error:
            return self._fail(group, f"cannot be patched: {error!r}", error)
        for patch in group:
            self._settle(self._ledger.row(patch), verdicts.get(patch.target + patch.kind), slot.current, late)

    def _make(self, change: Change, made: list[Change]) -> None:
        with self._changing:
            change.make()
            self._changes.append(change)
        made.append(change)

    def _settle(self, row: Row, verdict: Verdict | None, original: Any, late: bool) -> None:
        if verdict is not None and verdict.fails:
            return row.settle("drifted", f"{verdict.detail} ({verdict.place})", late=late)
        reason = f"{verdict.detail} ({verdict.place})" if verdict and verdict.drifted else ""
        if verdict is None or verdict.status == "no_pin":
            reason = "no pin"
        elif verdict.drifted:
            logger.warning("%s: %s", row.target, reason)
        row.settle("applied", reason, late=late)

    def _repair(self, module: ModuleType, made: list[Change]) -> None:
        """Put the new objects where siblings took the old ones by value, in one sweep; add to ``made``.

        That happens in a circular import, whose body had not ended, and when patching late.
        """
        changes, repaired = list(made), {id(module): module}
        olds = {
            id(change.old): change
            for change in changes
            if change.owner is module and is_shared_by_identity(change.old, module.__name__)
        }
        news = {id(change.new) for change in changes if change.owner is module and callable(change.new)}
        with self._changing:
            ours = {(id(change.owner), change.name) for change in self._changes}
        for holder, name, value in holders(news | olds.keys(), self.prefixes):
            change = olds.get(id(value))
            if change is not None:
                repair = Change(module, change.qualname, holder, name, value, change.new)
                self._repair_one(repair, f"{holder.__name__}.{name}", made)
                repaired[id(holder)] = holder
            elif id(value) in news and (id(holder), name) not in ours:
                news.discard(id(value))  # it has a home of its own in the upstream
        self._captured.extend(
            (change.name, change.new, change.old) for change in changes if id(change.new) in news
        )
        for holder in repaired.values():
            self._repair_values(module, holder, changes, made)

    def _repair_one(self, repair: Change, where: str, made: list[Change]) -> None:
        self._make(repair, made)
        for row in self._rows_of(repair):
            row.repaired.append(where)

    def _rows_of(self, change: Change) -> list[Row]:
        patches = self._patches_for(change.module.__name__)
        rows = [self._ledger.row(patch) for patch in patches if patch.qualname == change.qualname]
        return [row for row in rows if row.state in ("applied", "drifted")]

    def _repair_values(
        self, module: ModuleType, holder: ModuleType, changes: list[Change], made: list[Change]
    ) -> None:
        """Put the new objects into the values of ``holder`` that hold old ones, or tell that one cannot."""
        olds: dict[int, tuple[Change, Any, Any]] = {}
        for change in changes:
            if callable(bare(change.old)) and change.old is not MISSING and change.old is not change.new:
                olds[id(bare(change.old))] = change, bare(change.old), bare(change.new)
                olds[id(change.old)] = change, change.old, change.new
        ours = {id(value) for change in changes for value in (change.new, bare(change.new))}
        for held in list(captures(holder, olds.keys(), ours)):
            change, old, new = olds[id(held.value)]
            if not (is_shared_by_identity(old, module.__name__) and self._put(held, change, new, made)):
                logger.warning("%s:%s is still held by %s", module.__name__, change.qualname, held.where)
                for row in self._rows_of(change):
                    row.held.append(held.where)

    def _put(self, held: Held, change: Change, new: Any, made: list[Change]) -> bool:
        if held.put is None:
            return False
        repair = CapturedChange(change.module, change.qualname, held, held.where, held.value, new)
        try:
            self._repair_one(repair, held.where, made)
        except Exception:  # it may be read-only in its own way
            return False
        return True

    # --- restoring ---

    def _restore(self, changes: list[Change]) -> list[Change]:
        """Undo ``changes`` in reverse order; return those that were no longer in force."""
        with self._changing:
            refused = [change for change in reversed(changes) if not change.undo()]
            gone = set(map(id, changes))
            self._changes = [change for change in self._changes if id(change) not in gone]
        return refused

    def _release_captured(self) -> None:
        """Give the originals back to the modules that took the new objects by value."""
        captured, self._captured = self._captured, []
        originals: dict[int, dict[str, Any]] = {}
        for name, new, old in captured:
            originals.setdefault(id(new), {}).setdefault(name, old)
        for holder, name, value in holders(originals.keys(), self.prefixes):
            named = originals[id(value)]  # one new object may stand for several: the name tells which
            setattr(holder, name, named.get(name, next(iter(named.values()))))


def _deepest_first(patches: Iterable[Patch]) -> list[str]:
    """Return the qualified names, members before the class that holds them."""
    names = dict.fromkeys(patch.qualname for patch in patches)
    return sorted(names, key=lambda name: -name.count("."))


def _source(module: ModuleType) -> Source | None:
    origin = getattr(module.__spec__, "origin", None)
    try:
        return Source(module.__name__, origin) if origin and origin.endswith(".py") else None
    except OSError:
        return None


def _file(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _drift_message(verdicts: list[Verdict], context: Context) -> str:
    lines = [f"{verdict.target} ({verdict.place}): {verdict.detail}" for verdict in verdicts]
    return (
        f"{context.upstream} {context.version} is not what these patches were written against:\n  "
        + "\n  ".join(lines)
        + f"\nLook further with: {CHECK_COMMAND}"
    )


# --- the import system ------------------------------------------------------------------------------


class _Finder:
    """Finds nothing itself: hooks the loader that the other finders return."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self._engine.covers(name):
            return None
        names: set[str] = self._asking.__dict__.setdefault("names", set())
        if name in names:  # a finder that asks the others, as this one does, asks us in turn
            return None
        names.add(name)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            names.remove(name)
        if spec is not None:
            _hook(spec.loader, self._engine)
        return spec

    def _ask_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                return spec
        return None


class _Hook:
    """Stands on a loader instance as its ``exec_module``; the loader keeps its type.

    Copying or pickling gives the loader's own method back, so a copied loader is an ordinary one.
    """

    def __init__(self, loader: Any, engine: Engine) -> None:
        self._loader, self._run, self.engine = loader, loader.exec_module, engine

    def __call__(self, module: ModuleType) -> None:
        self.engine.execute(self._run, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._loader, "exec_module")


def _hook(loader: Any, engine: Engine) -> None:
    """Hook ``loader`` once. Namespace packages have no body, built-in modules (classes) are not hooked."""
    run = getattr(loader, "exec_module", None)
    if run is None or isinstance(loader, type):
        return
    if not (isinstance(run, _Hook) and run.engine is engine):
        loader.exec_module = _Hook(loader, engine)


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose body is running: tells when the import system declares it finished."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            callbacks = self.__dict__.pop("_callbacks")
            super().__setattr__("__class__", ModuleSpec)  # it is an ordinary one again
            for callback in callbacks:
                callback()


def _when_initialized(spec: ModuleSpec, callback: Callable[[], None]) -> None:
    """Call ``callback`` when the body of the module of ``spec``, which is running, has ended."""
    if type(spec) is ModuleSpec:
        vars(spec)["_callbacks"] = []
        spec.__class__ = _WatchedSpec
    if isinstance(spec, _WatchedSpec):
        vars(spec)["_callbacks"].append(callback)
