"""Implement ``megatron-npu bench``, which measures mixed precision, sharding, 3D parallelism and compiled
graphs.

The command prints one of the document's four tables: samples per second as mean and standard deviation, the
peak memory of the largest rank, OOM for rows that do not fit and NA for rows that cannot run. Each row runs
in separate processes.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata

from megatron_npu.base import files
from megatron_npu.measuring import arguments, plot, ranks
from megatron_npu.measuring.machine import Machine
from megatron_npu.measuring.plan import Plan, plan
from megatron_npu.measuring.report import Report, Row

_PACKAGES = ("torch", "torch-npu", "transformers", "megatron-core")


def main(argv: Sequence[str]) -> int:
    """Measure a table, and print it.

    Return the exit code, which is 1 if a row failed for a reason other than memory.

    Raises:
        UsageError: the input is invalid; raised before anything starts.
        KeyboardInterrupt: Ctrl-C was pressed, or another signal ends the command; raised after the measured
            rows are printed and written.
    """
    args = arguments.parser().parse_args(list(argv))
    prepared = plan(args, Machine.here())
    for line in prepared.said:
        print(line, flush=True)
    report = Report(prepared, dict(_versions()), [Row(scheme) for scheme in prepared.suite.schemes])
    try:
        for row in report.rows:
            row.outcome = _measured(prepared, row)
            _write(report, args)
    except KeyboardInterrupt as interrupt:
        print(f"\n{report.markdown()}", end="", flush=True)
        done = sum(row.outcome is not None for row in report.rows)
        raise type(interrupt)(f"; {done} of {len(report.rows)} rows were measured") from None
    print(f"\n{report.markdown()}", end="", flush=True)
    return int(any(row.outcome is not None and row.outcome.kind == ranks.FAILED for row in report.rows))


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _measured(prepared: Plan, row: Row) -> ranks.Outcome:
    """Measure a row with a progress bar, print its result, and return the outcome."""
    job = prepared.job(row.scheme)
    begin = time.monotonic()
    outcome = prepared.outcome_beforehand(job)
    if outcome is None:
        with _Progress(row.scheme.name, job.steps_in_all) as progress:
            outcome = ranks.run(job, progress.to)
    print(_line(Row(row.scheme, outcome), prepared, time.monotonic() - begin), flush=True)
    if outcome.kind == ranks.FAILED:
        print(outcome.log, file=sys.stderr, flush=True)
    return outcome


def _line(row: Row, prepared: Plan, seconds: float) -> str:
    outcome = row.outcome
    assert outcome is not None
    if not row.is_measured:
        return f" {row.scheme.name}: {outcome.kind} ({outcome.reason})"
    speed = "" if prepared.machine.simulated else f"{row.throughput:.2f} +/- {row.deviation:.2f} samples/s, "
    return f" {row.scheme.name}: {speed}{row.peak:.0f} MB ({seconds:.0f} s)"


class _Progress:
    """Display of the progress of a row, as a bar on a terminal."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps

    def __enter__(self) -> _Progress:
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._steps, desc=self._name, unit="step", leave=False, disable=not sys.stderr.isatty()
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def to(self, done: int) -> None:
        """Display that ``done`` steps are complete."""
        self._bar.update(done - self._bar.n)


def _write(report: Report, args: Namespace) -> None:
    """Write the requested files with all measurements made so far."""
    if args.json is not None:
        files.write(args.json, json.dumps(report.to_json(), indent=1) + "\n")
    if args.markdown is not None:
        files.write(args.markdown, report.markdown())
    if args.plot is not None:
        plot.draw(report.to_json(), args.plot)
