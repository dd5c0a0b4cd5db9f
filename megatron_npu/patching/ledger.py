"""Store the state of every patch, and print the states as text, JSON or Markdown."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_npu.patching.patch import Patch

_OF_PATCH = ("target", "kind", "origin", "ours", "why", "until", "upstream_bug", "devices")
STATES = ("applied", "drifted", "skipped", "failed", "pending", "off")
_URGENCY = ("failed", "drifted", "applied", "skipped", "off", "pending")  # the order of the text
_WIDTH, _INDENT = 100, " " * 18


@dataclass
class Row:
    """The state of one patch.

    Attributes:
        target, kind, origin, ours, why, until, upstream_bug, devices: see ``Patch``.
        state: ``pending`` (the module was not imported), ``applied``, ``skipped``, ``drifted`` (applied
            although upstream has changed), ``failed``, or ``off`` (its setting is disabled).
        reason: the reason for the state, or other remarks; may be empty.
        repaired: ``module.name`` for each name that was rebound to the new object.
        late: whether the patch was applied to a module that was already imported.
    """

    target: str
    kind: str
    origin: str
    ours: str
    why: str
    until: str
    upstream_bug: bool
    devices: tuple[str, ...]
    state: str = "pending"
    reason: str = ""
    repaired: list[str] = field(default_factory=list)
    late: bool = False

    def settle(self, state: str, reason: str = "", *, late: bool = False) -> None:
        """Set the state of the patch, and clear the names that were rebound in the previous state."""
        self.state, self.reason, self.late = state, reason, late
        self.repaired = []


class Ledger:
    """The states of all patches, and how often each fast path was not used.

    Attributes:
        fallbacks: how often an operation did not use its fast path, by name and reason. The code that counts
            these cases stores its mapping here; the ledger only reports it.
        about: other information, such as the upstream and the device, stored by the code that provides it,
            under names that the ledger does not use itself.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[object, ...], Row] = {}
        self.fallbacks: Mapping[tuple[str, str], int] = {}
        self.about: Mapping[str, str | bool] = {}

    @property
    def rows(self) -> list[Row]:
        """The rows in the order in which the patches were registered."""
        return list(self._rows.values())

    def row(self, patch: Patch) -> Row:
        """Return the row of ``patch``, creating one in state ``pending`` if there is none."""
        row = self._rows.get(patch.key)
        if row is None:
            row = Row(**{name: getattr(patch, name) for name in _OF_PATCH})
            row = self._rows.setdefault(patch.key, row)  # another thread may have entered one in the meantime
        return row

    def keep(self, patches: Iterable[Patch]) -> None:
        """Keep only the rows of ``patches``, in the given order, with their states."""
        self._rows = {patch.key: self.row(patch) for patch in patches}

    def count(self, state: str) -> int:
        """Return the number of rows in the given state."""
        return sum(row.state == state for row in self._rows.values())

    def summary(self) -> str:
        """Return a one-line summary such as ``29 applied, 0 drifted, 2 skipped (reason; reason), 1 failed
        (target)``.

        Patches whose setting is off are omitted.
        """
        parts = [self._part(state) for state in ("applied", "drifted", "skipped")]
        parts += [self._part(state) for state in ("failed", "pending") if self.count(state)]
        operations = dict.fromkeys(name for name, _ in self.fallbacks)
        parts += [f"fallbacks: {', '.join(operations)}"] if operations else []
        return ", ".join(parts)

    def _part(self, state: str) -> str:
        rows = [row for row in self.rows if row.state == state]
        told: dict[str, None] = {}
        if state == "failed":
            told = dict.fromkeys(row.target for row in rows)
        elif state in ("drifted", "skipped"):
            told = dict.fromkeys(sorted(row.reason for row in rows if row.reason))
        return f"{len(rows)} {state}" + (f" ({'; '.join(told)})" if told else "")

    def text(self, *, pending: bool = False) -> str:
        """Return the ledger in the form of text for a terminal.

        General information comes first, followed by each patch with its remarks.

        Failures come first. Pending patches are only counted, by reason.

        Args:
            pending: whether to list each pending patch too.
        """
        about = [f"{name} {value}" for name, value in self.about.items() if isinstance(value, str)]
        lines = [" · ".join(about)] if about else []
        told = [row for row in self.rows if pending or row.state != "pending"]
        for row in sorted(told, key=lambda row: _URGENCY.index(row.state)):
            lines.append(f"{row.state:<8} {row.kind:<8} {row.target}")
            for remark in (
                row.ours,
                *_remarks(row),
                row.why,
                *([f"until {until(row)}"] if row.until else []),
            ):
                lines += _wrapped(remark)
        if not pending:
            lines += self._pending_by_reason()
        lines += [f"fallback {name}: {reason} ({count}x)" for (name, reason), count in self.fallbacks.items()]
        return "\n".join([*lines, self.summary()])

    def _pending_by_reason(self) -> list[str]:
        counts = Counter(row.reason for row in self.rows if row.state == "pending")
        lines = []
        for reason, count in counts.most_common():
            lines.append(f"pending  {count} patches" if count > 1 else "pending  1 patch")
            lines += _wrapped(reason or "their modules have not been fully imported")
        return lines

    def json(self) -> str:
        """Return a JSON object with ``about``, ``summary``, ``counts``, ``patches`` and ``fallbacks``."""
        fallbacks = [
            {"operation": name, "reason": reason, "count": count}
            for (name, reason), count in self.fallbacks.items()
        ]
        return json.dumps(
            {
                **self.about,
                "summary": self.summary(),
                "counts": {state: self.count(state) for state in STATES},
                "patches": [asdict(row) for row in self.rows],
                "fallbacks": fallbacks,
            },
            indent=2,
        )

    def markdown(self) -> str:
        """Return the ledger as a Markdown table."""
        lines = ["| target | kind | devices | state | ours | why | until |", "|---|---|---|---|---|---|---|"]
        for row in self.rows:
            state = "; ".join([row.state, *_remarks(row)])
            cells = (
                f"`{row.target}`",
                row.kind,
                ", ".join(row.devices),
                state,
                f"`{row.ours}`",
                row.why,
                until(row),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # paths stay whole
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, **options)


def until(patch: Patch | Row) -> str:
    """Return when a patch can be removed, and whether it fixes a bug of upstream.

    The text may be empty.
    """
    return f"{patch.until} (upstream bug)" if patch.upstream_bug else patch.until


def _remarks(row: Row) -> list[str]:
    remarks = [row.reason] if row.reason else []
    if row.late:
        remarks.append("it was applied late, because the module was already imported")
    if row.repaired:
        remarks.append("repaired: " + ", ".join(row.repaired))
    return remarks
