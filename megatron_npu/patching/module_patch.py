"""Patch one module after its execution: check its pins, replace symbols, and rebind names in modules that
import it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType

from megatron_npu.patching import repair
from megatron_npu.patching.attribute_patch import Change, ChangeLog, find_slot, new_value
from megatron_npu.patching.ledger import Ledger, Row
from megatron_npu.patching.patch import NotAsked, Patch
from megatron_npu.patching.pins import Pins
from megatron_npu.patching.registry import in_order
from megatron_npu.patching.sources import Source
from megatron_npu.patching.verdicts import Verdict, compare

logger = logging.getLogger(__name__)

CHECK_COMMAND = "megatron-npu check --megatron PATH"
ACCEPT = "MEGATRON_NPU_DRIFT=warn"  # makes ``Context.drift`` ``warn``
IN_FORCE = ("applied", "drifted")  # the states of a patch that is in place


class DriftError(Exception):
    """Raised when an upstream symbol differs from the version for which a patch was written.

    Args:
        message: the differences.
        targets: the targets of the affected patches.
    """

    def __init__(self, message: str, targets: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.targets = tuple(dict.fromkeys(targets))


class PatchError(Exception):
    """Raised when a patch cannot be applied because of a bug in the patch itself."""


@dataclass(frozen=True)
class Context:
    """The information about the upstream that all patches share.

    Attributes:
        upstream, version: the name and version of upstream.
        device: the name of the device.
        pins: the pins of upstream. If None, drift is not checked.
        drift: ``error`` raises ``DriftError``; ``warn`` logs a warning, and applies the patches all the
            same, except those whose target is gone.
    """

    upstream: str
    version: str
    device: str
    pins: Pins | None = None
    drift: str = "error"


@dataclass
class ModulePatch:
    """The patches of one module, which are applied together or not at all.

    Attributes:
        module: the module.
        context: the upstream, device and pins.
        ledger: where the state of each patch is recorded.
        log: where the changes are recorded, so that they can be undone.
        covers: returns whether a module with the given name belongs to upstream.
        late: whether the module was imported before the plug-in, so that other modules may have used it.
        made: the changes made by this object; other threads may patch other modules at the same time.
    """

    module: ModuleType
    context: Context
    ledger: Ledger
    log: ChangeLog
    covers: Callable[[str], bool]
    late: bool
    made: list[Change] = field(default_factory=list)

    def apply(self, patches: Iterable[Patch]) -> list[repair.Offer]:
        """Apply the patches of the module that are enabled on this device.

        Returns:
            The new objects that other modules may import by value from now on.

        Raises:
            DriftError: upstream has changed too much for a patch, and ``Context.drift`` is ``error``.
            PatchError: a patch cannot be applied, and ``Context.drift`` is ``error``.
        """
        wanted = [patch for patch in patches if self._is_wanted(patch)]
        if not wanted:
            return []
        verdicts = self._check(wanted)
        try:
            for qualname in _deepest_first(wanted):
                self._apply_target([patch for patch in wanted if patch.qualname == qualname], verdicts)
            return self._repair()
        except BaseException:
            self.log.undo(self.made)
            for row in map(self.ledger.row, wanted):
                if row.state in IN_FORCE:
                    row.settle("pending", "it was reverted, because another patch of the module failed")
            raise

    def _is_wanted(self, patch: Patch) -> bool:
        row = self.ledger.row(patch)
        reason = patch.reason_to_skip(self.context.device)
        if reason is not None:
            row.settle("off" if isinstance(reason, NotAsked) else "skipped", reason)
        elif patch.early and self.late and row.state != "applied":
            row.settle(
                "failed", "the module was imported before the plug-in, and other modules have already used it"
            )
            logger.warning("%s: %s", patch.target, row.reason)
        else:
            return True
        return False

    # --- drift ---

    def _check(self, patches: list[Patch]) -> dict[tuple[object, ...], Verdict]:
        """Compare the module with its pins, and return the verdicts by patch key.

        The result is empty if there are no pins or no source file.
        """
        source = _source(self.module)
        if self.context.pins is None or source is None:
            return {}
        verdicts = [(patch, compare(patch, source, self.context.pins)) for patch in patches]
        failing = [(patch, verdict) for patch, verdict in verdicts if verdict.fails]
        if failing:
            message = _drift_message([verdict for _, verdict in failing], self.context)
            if self.context.drift == "error":
                for patch, verdict in failing:
                    self.ledger.row(patch).settle("failed", f"{verdict.detail} ({verdict.place})")
                raise DriftError(message, [patch.target for patch, _ in failing])
            logger.warning("%s", message)
        return {patch.key: verdict for patch, verdict in verdicts}

    def _fail(self, patches: list[Patch], reason: str, cause: BaseException | None = None) -> None:
        for patch in patches:
            self.ledger.row(patch).settle("failed", reason)
        if self.context.drift == "error":
            raise PatchError(f"{patches[0].target} ({patches[0].origin}): {reason}") from cause
        logger.warning("%s (%s): %s", patches[0].target, patches[0].origin, reason)

    # --- one target ---

    def _apply_target(self, group: list[Patch], verdicts: dict[tuple[object, ...], Verdict]) -> None:
        """Apply all patches of a target in one step.

        The replacement is applied first, followed by wrappers of the original.
        """
        qualname = group[0].qualname
        slot = find_slot(self.module, qualname)
        verdict = verdicts.get(group[0].key)
        if slot is None and verdict is not None and verdict.status != "gone":
            for patch in group:
                self.ledger.row(patch).settle(
                    "skipped",
                    f"the target's definition has a condition that is not met ({verdict.place})",
                )
            return
        if slot is None:
            return self._fail(group, f"missing in {_file(self.module)}")
        value = slot.current
        try:
            for patch in in_order(group):
                value = new_value(patch, value)
            self._make(Change(self.module, qualname, slot.owner, slot.name, slot.own, value))
        except Exception as error:
            return self._fail(group, f"cannot be patched: {error!r}", error)
        for patch in group:
            self._settle(self.ledger.row(patch), verdicts.get(patch.key))

    def _make(self, change: Change) -> None:
        self.log.make(change)
        self.made.append(change)

    def _settle(self, row: Row, verdict: Verdict | None) -> None:
        if verdict is not None and verdict.fails:
            return row.settle("drifted", f"{verdict.detail} ({verdict.place})", late=self.late)
        reason = f"{verdict.detail} ({verdict.place})" if verdict and verdict.drifted else ""
        if verdict is None or verdict.status == "no_pin":
            reason = "no pin"
        elif verdict.drifted:
            logger.warning("%s: %s", row.target, reason)
        row.settle("applied", reason, late=self.late)

    # --- names that hold the original ---

    def _repair(self) -> list[repair.Offer]:
        """Rebind names in modules that have imported a replaced object by value."""
        repairs, offers = repair.find_repairs(self.module, self.made.copy(), self.log.slots(), self.covers)
        for change in repairs:
            self._make(change)
            for row in self._rows_of(change):
                row.repaired.append(str(change))
        return offers

    def _rows_of(self, change: Change) -> list[Row]:
        rows = self.ledger.rows
        return [row for row in rows if row.target == change.target and row.state in IN_FORCE]


def _deepest_first(patches: Iterable[Patch]) -> list[str]:
    """Return the qualified names of the patches, in an order in which members precede the class that
    contains them.
    """
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
    title = (
        f"{context.upstream} {context.version} differs from the version that these patches were written for:"
    )
    lines = [f"{each.target} ({each.place}): {each.detail}; patched in {each.ours}" for each in verdicts]
    if context.drift == "error":
        advice = f"Use a supported version, or set {ACCEPT} to apply the patches anyway, at your own risk."
    else:
        advice = "They are applied anyway, except those whose function is gone."
    return "\n  ".join([title, *lines]) + f"\n{advice} For details, run: {CHECK_COMMAND}"
