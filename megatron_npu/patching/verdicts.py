"""Determine the state of a patch's target by comparing the target's source with the pins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_npu.patching.own_parameters import conflict, use_of
from megatron_npu.patching.patch import REPLACEMENTS, Patch
from megatron_npu.patching.pins import Pin, Pins
from megatron_npu.patching.sources import Source


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a patch target with its pins.

    Attributes:
        status: ``same``, ``body_changed``, ``signature_changed``, ``gone`` or ``no_pin``.
        kind: the kind of the patch.
        file: the source file, or the module if there is no file.
        line: the line of the current definition; 0 if there is none.
        detail: a description of the change.
        pin: the version whose pin matches or, if none matches, the version with which the target was
            compared; empty without a pin.
        fits: whether the changed signature does not affect our function.
        ours: ``file:line`` of the patch.
    """

    status: str
    target: str
    kind: str
    file: str
    line: int = 0
    detail: str = ""
    pin: str = ""
    fits: bool = False
    ours: str = ""

    @property
    def drifted(self) -> bool:
        """True if upstream differs from the version for which the patch was written."""
        return self.status in ("body_changed", "signature_changed", "gone")

    @property
    def fails(self) -> bool:
        """True if the patch must not be applied to the target.

        A patch that calls the original can be applied if the body has changed; ``around`` can also be applied
        if the signature has changed but ``fits``.
        """
        survives = self.fits or (self.status == "body_changed" and self.kind not in REPLACEMENTS)
        return self.drifted and not survives

    @property
    def place(self) -> str:
        """The position of the current definition, in the form ``file:line``."""
        return f"{self.file}:{self.line}" if self.line else self.file


def compare(patch: Patch, source: Source | None, pins: Pins) -> Verdict:
    """Compare the signature of a patch's target in ``source`` with the pinned signatures.

    ``source`` is None if there is no such file.
    """
    return replace(_compare(patch, source, pins), ours=patch.ours)


def _compare(patch: Patch, source: Source | None, pins: Pins) -> Verdict:
    if source is None:
        return Verdict("gone", patch.target, patch.kind, patch.module, 0, "the module has no source file")
    file = str(source.path)
    voucher = pins.voucher(patch.target, patch.module, source.digest)
    if voucher:
        return Verdict("same", patch.target, patch.kind, file, pin=voucher)
    try:
        nodes = source.locate(patch.qualname)
    except SyntaxError as error:
        return Verdict("gone", patch.target, patch.kind, file, error.lineno or 0, f"unreadable: {error.msg}")
    if not nodes:
        return Verdict("gone", patch.target, patch.kind, file, 0, "the file does not define it")
    status, detail, pin, fits = _judge(patch, Pin.of(nodes), pins.of(patch.target))
    return Verdict(status, patch.target, patch.kind, file, nodes[0].lineno, detail, pin, fits)


def _judge(patch: Patch, found: Pin, known: dict[str, Pin]) -> tuple[str, str, str, bool]:
    """Return the status of a patch, the details, the deciding version, and whether a changed signature is
    compatible.
    """
    if not known:
        return "no_pin", "no pin", "", False
    for version, pin in known.items():
        if pin.fingerprint == found.fingerprint:
            return "same", "", version, False
    for version, pin in known.items():
        if pin.signature == found.signature:
            return "body_changed", "body changed, same signature", version, False
    version, pin, reason = _nearest(patch, found.signature, known)
    detail = f"signature changed from {pin.signature!r} to {found.signature!r}"
    if patch.kind != "around":
        return "signature_changed", detail, version, False
    told = f"{reason}: {detail}" if reason else f"no change that affects our function: {detail}"
    return "signature_changed", told, version, reason is None


def _nearest(patch: Patch, signature: str, known: dict[str, Pin]) -> tuple[str, Pin, str | None]:
    """Return the first version whose pin is compatible with the patch, then this pin, and None.

    If all pins conflict, return the first version, its pin and the conflict.
    """
    use = use_of(patch.make) if patch.kind == "around" else None
    reasons = {version: conflict(use, pin.signature, signature) for version, pin in known.items()}
    version = next((version for version, reason in reasons.items() if reason is None), next(iter(known)))
    return version, known[version], reasons[version]


def by_target(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Group verdicts by target, with the worst verdict first.

    Targets keep the order of their first verdict.
    """
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.target, []).append(verdict)
    return [sorted(group, key=lambda v: (not v.fails, not v.drifted)) for group in groups.values()]
