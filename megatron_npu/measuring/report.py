"""Write the measurements made so far as text tables, Markdown and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from megatron_npu.measuring import causes
from megatron_npu.measuring.causes import AS_THERE, OTHERWISE, UNDECIDED
from megatron_npu.measuring.job import WARM_UP
from megatron_npu.measuring.plan import Plan
from megatron_npu.measuring.ranks import MEASURED, Outcome
from megatron_npu.measuring.schemes import Scheme

MB = 1 << 20
LEFT_OUT = "-"


@dataclass
class Row:
    """A row of the table, with its outcome or None before it is measured."""

    scheme: Scheme
    outcome: Outcome | None = None

    @property
    def is_measured(self) -> bool:
        """True if the row has measured values."""
        return self.outcome is not None and self.outcome.kind == MEASURED

    @property
    def throughput(self) -> float:
        """The mean number of samples per second."""
        assert self.outcome is not None
        return statistics.fmean(self.outcome.throughputs)

    @property
    def deviation(self) -> float:
        """The standard deviation of the samples per second over all repetitions, or 0 for a single
        repetition.
        """
        assert self.outcome is not None
        values = self.outcome.throughputs
        return statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def uncertainty(self) -> float:
        """The standard error of the mean, as a fraction of the mean."""
        assert self.outcome is not None
        return self.deviation / math.sqrt(len(self.outcome.throughputs)) / self.throughput

    @property
    def processor(self) -> float | None:
        """The CPU time per sample in milliseconds, or None if unknown."""
        assert self.outcome is not None
        return statistics.fmean(self.outcome.processor) * 1e3 if self.outcome.processor else None

    @property
    def peak(self) -> float:
        """The peak memory, in MB, of the rank that uses the most."""
        assert self.outcome is not None
        return max(self.outcome.peaks) / MB


@dataclass
class Report:
    """A table of results, which grows as its rows are measured.

    Attributes:
        plan: what is measured, and where.
        versions: the versions of the packages used for training.
        rows: the rows in the document's order.
    """

    plan: Plan
    versions: dict[str, str]
    rows: list[Row]

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the model that was built, or None if no model was built."""
        return next((row.outcome.parameters for row in self.rows if row.outcome and row.is_measured), None)

    def markdown(self) -> str:
        """Return the heading, the table, the comparison with the document and the footnotes as Markdown."""
        footnotes = Footnotes()
        tables = [self._table(footnotes), self._comparison(footnotes)]
        notes = [f"- {note}" for note in self.plan.machine.notes(self.plan.ranks, self.plan.mixed_precision)]
        head = [f"## {self.plan.suite.name}", "\n".join(self._head())]
        return "\n\n".join(filter(None, [*head, *tables, footnotes.text(), "\n".join(notes)])) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return all results as values that JSON can represent."""
        plan = self.plan
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "suite": plan.suite.name,
            "model": asdict(plan.size),
            "parameters": self.parameters,
            "devices": plan.ranks,
            "device": plan.machine.device,
            "hardware": self._hardware(),
            "cores": plan.machine.cores,
            "load": round(plan.machine.load, 2),
            "micro_batch_size": plan.micro_batch_size,
            "global_batch_size": plan.global_batch_size,
            "steps": plan.steps,
            "repeat": plan.repeat,
            "warm_up_steps": WARM_UP,
            "mixed_precision": plan.mixed_precision,
            "versions": self.versions,
            "notes": plan.machine.notes(plan.ranks, plan.mixed_precision),
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        named = dict(zip(self.plan.suite.columns, row.scheme.cells, strict=True))
        if row.outcome is None:
            return {**named, "outcome": "not measured"}
        values: dict[str, Any] = {**named, "outcome": row.outcome.kind}
        if not row.is_measured:
            return values | {"reason": row.outcome.reason}
        if not self.plan.machine.simulated:
            values |= {
                "samples_per_second": round(row.throughput, 4),
                "standard_deviation": round(row.deviation, 4),
                "samples_per_second_of_repeats": [round(one, 4) for one in row.outcome.throughputs],
            }
        return values | {
            "processor_ms_per_sample": row.processor and round(row.processor, 2),
            "peak_mb": round(row.peak, 1),
            "peak_bytes_of_ranks": row.outcome.peaks,
            "parameters": row.outcome.parameters,
        }

    def _hardware(self) -> str:
        return next((row.outcome.device for row in self.rows if row.outcome and row.is_measured), "")

    def _head(self) -> Iterator[str]:
        plan, size, hardware = self.plan, self.plan.size, self._hardware()
        counted = "" if self.parameters is None else f": {self.parameters} parameters"
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"{plan.suite.title[0].upper()}{plan.suite.title[1:]}.\n"
        yield (
            f"- {size.name}: {size.layers} layers x {size.hidden} channels x {size.heads} heads, "
            f"{size.seq_length} tokens, vocabulary {size.vocabulary}{counted}"
        )
        yield f"- {plan.ranks} x {plan.machine.device}{f' ({hardware})' if hardware else ''}; {software}"
        yield (
            f"- micro batch {plan.micro_batch_size}, global batch {plan.global_batch_size}; {plan.repeat} x "
            f"{plan.steps} timed steps after {WARM_UP} warm-up steps; mixed precision is "
            f"{plan.mixed_precision}"
        )

    def _table(self, footnotes: Footnotes) -> str:
        head = [*self.plan.suite.columns, "throughput (samples/s)", "peak memory (MB)"]
        if self.plan.machine.is_host:
            head.append("CPU time (ms/sample)")
        return aligned([head, *(self._cells(row, footnotes) for row in self.rows)])

    def _cells(self, row: Row, footnotes: Footnotes) -> list[str]:
        *others, last = row.scheme.cells
        outcome = row.outcome
        mark = footnotes.mark(row.scheme.note)
        if outcome is None:
            return self._cut([*others, last + mark, *["not measured"] * 3])
        if row.is_measured:
            told = (
                LEFT_OUT if self.plan.machine.simulated else f"{row.throughput:.2f} +/- {row.deviation:.2f}"
            )
            used = LEFT_OUT if row.processor is None else f"{row.processor:.1f}"
            return self._cut([*others, last + mark, told, f"{row.peak:.0f}", used])
        word = outcome.kind + footnotes.mark(outcome.reason)
        return self._cut([*others, last + mark, *[word] * 3])

    def _cut(self, cells: list[str]) -> list[str]:
        """Leave out the column for CPU time if the model does not run on the CPU."""
        return cells if self.plan.machine.is_host else cells[:-1]

    def _comparison(self, footnotes: Footnotes) -> str:
        """Return a table with the ratios of each row to the first row for which the document gives values.

        Each row shows the document's ratios and the measured ratios. If their directions differ, a footnote
        states what cannot be observed on this machine.
        """
        base = next(row for row in self.rows if row.scheme.printed.peak is not None)
        if not base.is_measured:
            return ""
        of = f"times {base.scheme.name}"
        head = [
            *self.plan.suite.columns,
            f"throughput, {of}: document",
            "here",
            f"peak, {of}: document",
            "here",
            "direction",
        ]
        rows = [
            [
                *row.scheme.cells,
                *self._ratios(row, base),
                self.direction(row, base) + self._why(row, base, footnotes),
            ]
            for row in self.rows
            if row is not base and row.is_measured
        ]
        return aligned([head, *rows]) if rows else ""

    def _ratios(self, row: Row, base: Row) -> list[str]:
        printed, first = row.scheme.printed, base.scheme.printed
        faster = LEFT_OUT if self.plan.machine.simulated else f"{row.throughput / base.throughput:.2f}"
        return [
            _over(printed.throughput, first.throughput) or printed.word or LEFT_OUT,
            faster,
            _over(printed.peak, first.peak) or printed.word or LEFT_OUT,
            f"{row.peak / base.peak:.2f}",
        ]

    def direction(self, row: Row, base: Row) -> str:
        """Return True if a row differs from ``base`` in the same direction as it does in the document."""
        verdicts = self._verdicts(row, base)
        if not verdicts:
            word = row.scheme.printed.word
            there = f"{word} in the document" if word else "not in the document"
            return f"{there}; peak {_side(row.peak / base.peak)} here"
        if len(verdicts) > 1 and set(verdicts.values()) == {AS_THERE}:
            return AS_THERE
        return "; ".join(f"{name} {verdict}" for name, verdict in verdicts.items())

    def _why(self, row: Row, base: Row, footnotes: Footnotes) -> str:
        return footnotes.mark(causes.why(self.plan, row.scheme, self._verdicts(row, base)))

    def _verdicts(self, row: Row, base: Row) -> dict[str, str]:
        """Return whether peak memory and throughput agree with the document's values, where the document
        has them.
        """
        printed, first = row.scheme.printed, base.scheme.printed
        if printed.peak is None or first.peak is None:
            return {}
        verdicts = {"peak": _same(printed.peak / first.peak, row.peak / base.peak, SLIGHT)}
        if not self.plan.machine.simulated and printed.throughput and first.throughput:
            noise = 2 * math.hypot(row.uncertainty, base.uncertainty)
            faster = row.throughput / base.throughput
            verdicts["throughput"] = _same(printed.throughput / first.throughput, faster, noise)
        return verdicts


SLIGHT = 0.02  # a peak that differs by less has no direction


def _same(there: float, here: float, noise: float) -> str:
    """Return True if two ratios are on the same side of 1, or if ``here`` is too close to 1 to tell."""
    if abs(there - 1) <= SLIGHT:
        return AS_THERE if abs(here - 1) <= max(noise, SLIGHT) else f"{_side(here)}, there about the same"
    if abs(here - 1) <= noise:
        return UNDECIDED
    return AS_THERE if (there > 1) == (here > 1) else OTHERWISE


def _side(ratio: float) -> str:
    if abs(ratio - 1) <= SLIGHT:
        return UNDECIDED
    return "higher" if ratio > 1 else "lower"


def _over(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one is not None and other is not None else ""


class Footnotes:
    """The footnotes of a table.

    Equal texts share a number.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """Return the mark for a footnote, or an empty string if there is no text."""
        if not text:
            return ""
        if text not in self._texts:
            self._texts.append(text)
        return f" [{self._texts.index(text) + 1}]"

    def text(self) -> str:
        """Return all footnotes as one paragraph, with one footnote per line.

        In Markdown, two spaces end a line.
        """
        return "  \n".join(f"[{number}] {text}" for number, text in enumerate(self._texts, 1))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns.

    The first row is the header.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in (rows[0], rule, *rows[1:])
    )
