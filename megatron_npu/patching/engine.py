"""Patch upstream modules after they have been executed, and undo the patches on request."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType

from megatron_npu.patching import repair
from megatron_npu.patching.attribute_patch import ChangeLog
from megatron_npu.patching.import_hook import Finder, Run, is_initializing, when_initialized
from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.module_patch import IN_FORCE, Context, ModulePatch
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.registry import Registry

logger = logging.getLogger(__name__)


class Engine:
    """Applies the patches of a registry to modules whose names have given prefixes.

    Args:
        registry: the patches; ``on_first`` may add more.
        prefixes: the top-level names of upstream's packages.
        on_first: called once, before the first module is executed. If it raises an error, that import fails,
            and the next import calls it again.
    """

    def __init__(
        self, registry: Registry, *, prefixes: tuple[str, ...], on_first: Callable[[], Context]
    ) -> None:
        self.registry, self.prefixes, self._on_first = registry, prefixes, on_first
        self._beginnings = tuple(f"{prefix}." for prefix in prefixes)
        self._finder = Finder(self.covers, self.execute)
        self._ledger = Ledger()
        self._context: Context | None = None
        self._activating = False
        self._lock = threading.RLock()  # held while on_first runs
        self._running: set[int] = set()  # ids of the modules whose bodies run under our hook
        self._patched: dict[str, ModuleType] = {}
        self._log = ChangeLog()
        self._offers: list[repair.Offer] = []  # what others may have taken by value since
        self._incomplete = False  # a module that was there before could not be patched
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_locks)

    def _renew_locks(self) -> None:
        # A thread that held a lock does not exist in the child.
        self._lock, self._activating = threading.RLock(), False
        self._log.renew_lock()

    # --- switching on and off ---

    @property
    def armed(self) -> bool:
        """True if the import hook is installed."""
        return self._finder.armed

    @property
    def context(self) -> Context | None:
        """The result of ``on_first``, or None if it has not been called yet."""
        return self._context

    def arm(self) -> None:
        """Install the import finder at the front of ``sys.meta_path``. A second call has no effect."""
        self._finder.arm()

    def disarm(self) -> None:
        """Remove the import hook, but leave the patches in effect.

        If the hook is armed again, ``on_first`` is called again.
        """
        self._finder.disarm()
        self._context = None

    def apply_loaded(self) -> None:
        """Patch the modules that were imported before the engine was armed.

        Functions and classes that other upstream modules or the main module imported by value are rebound.
        Plain values, and names that the patched module itself had imported, are not rebound. A module that is
        still being executed is patched when its execution ends.

        Raises:
            DriftError: see ``Context.drift``.
        """
        if not any(
            self.covers(name) and hasattr(sys.modules[name], "__file__") for name in list(sys.modules)
        ):
            return
        self._incomplete = True
        self.activate()
        for name in self.registry.modules():
            self._catch_up(name)
        self._incomplete = False

    def reconsider(self) -> None:
        """Apply patches whose setting was off when their module was imported and has been turned on since
        then.
        """
        if self._context is None:
            return
        for module in list(self._patched.values()):
            patches = self._meant(module, self._context)
            off = [patch for patch in patches if self._ledger.row(patch).state == "off"]
            patching = ModulePatch(module, self._context, self._ledger, self._log, self.covers, late=True)
            self._offers.extend(patching.apply(off))

    def undo(self) -> None:
        """Undo all changes in reverse order, including those to names that were imported by value.

        A slot that other code has set since is left unchanged, and a warning is issued.
        """
        for change in self._log.undo(self._log.all()):
            logger.warning("%s was changed by other code and is left unchanged", change)
        offers, self._offers = self._offers, []
        repair.take_back(offers, self.covers)
        self._patched.clear()
        for row in self._ledger.rows:
            row.settle("pending", "undone" if row.state in IN_FORCE else "")

    # --- the ledger ---

    @property
    def ledger(self) -> Ledger:
        """The state of every patch for this upstream version.

        All patches are included while the version is unknown.
        """
        context = self._context
        self._ledger.keep(
            patch
            for patch in self.registry.patches
            if context is None or patch.is_for(context.upstream, context.version)
        )
        if self.armed and context is not None:
            self._report_missed(context)
        return self._ledger

    def _report_missed(self, context: Context) -> None:
        for patch in self.registry.patches:
            module = sys.modules.get(patch.module)
            if module is None or self._is_in_hand(module):
                continue
            if not patch.is_for(context.upstream, context.version):
                continue
            row = self._ledger.row(patch)
            if row.state == "pending":
                row.settle("failed", "the module was imported before the import hook was installed")

    # --- from the import to the patch ---

    def covers(self, name: str) -> bool:
        """Return True if the module ``name`` belongs to upstream."""
        return f"{name}.".startswith(self._beginnings)  # asked of every module, again and again

    def execute(self, run: Run, module: ModuleType) -> None:
        """Execute a module, and then patch it. Loaders call this method instead of ``exec_module``."""
        if not self.armed or id(module) in self._running:
            return run(module)
        self._running.add(id(module))
        try:
            self.activate()
            if self._incomplete:
                self.apply_loaded()
            self._forget(module)
            run(module)
            self._patch(module, late=False)
        finally:
            self._running.discard(id(module))

    def _forget(self, module: ModuleType) -> None:
        """Undo the patches of a module before it is reloaded, because its code must find the original
        names.
        """
        self._log.undo(change for change in self._log.all() if change.owner is module)
        self._patched.pop(module.__name__, None)
        for patch in self.registry.for_module(module.__name__):
            self._ledger.row(patch).settle("pending")

    def activate(self) -> None:
        """Call ``on_first`` when upstream is first imported, and patch the modules that this call has
        imported.
        """
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
        if is_initializing(module):
            when_initialized(module, lambda: self._patch_finished(module))
        else:
            self._patch(module, late=True)

    def _patch_finished(self, module: ModuleType) -> None:
        """Patch a module that was being executed when the engine was armed, after its execution has ended."""
        if sys.modules.get(module.__name__) is not module or not self.armed or self._is_in_hand(module):
            return
        try:
            self._patch(module, late=False)
        except BaseException:
            del sys.modules[module.__name__]  # as the import system does for a module that fails
            raise

    def _patch(self, module: ModuleType, *, late: bool) -> None:
        context = self._context
        if context is None:  # on_first is still running; it will catch up
            return
        patching = ModulePatch(module, context, self._ledger, self._log, self.covers, late)
        self._offers.extend(patching.apply(self._meant(module, context)))
        self._patched[module.__name__] = module

    def _meant(self, module: ModuleType, context: Context) -> list[Patch]:
        patches = self.registry.for_module(module.__name__)
        return [patch for patch in patches if patch.is_for(context.upstream, context.version)]
