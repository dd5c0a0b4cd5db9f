"""Implement ``megatron-npu plan``, which runs a job for many devices and counts only device memory.

One rank of each kind runs with the job's command line; the other ranks do not exist, and large tensors are
not computed. Exit code 2 means that the job does not fit, or cannot run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_npu.base import files, output_files
from megatron_npu.base.arg_parser import Number, Parser, byte_size, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.planning import hardware, page, remedies
from megatron_npu.planning.calibration import Calibration
from megatron_npu.planning.hardware import HARDWARE
from megatron_npu.planning.job import TRAIN, Job
from megatron_npu.planning.pipeline import Order
from megatron_npu.planning.ranks import ENOUGH, Ranks
from megatron_npu.planning.report import Plan, Row
from megatron_npu.planning.search import DryRun, Search

_DESCRIPTION = (
    "Dry-run a job of --devices ranks on this machine. The report shows the memory and communication of\n"
    "each kind of rank, whether the job fits, and the flags that would make it fit. With --device npu, the\n"
    "plan uses torch_npu's own allocator on the simulated Ascend, whose memory is only reserved. With\n"
    "--device cuda, the plan uses torch's fake tensors and a simulation of the caching allocator. Exit code\n"
    "2: the job does not fit, or cannot run."
)
_USAGE = """%(prog)s --devices N [--memory 64G] [--device npu] -- pretrain ARGUMENTS...
       %(prog)s --devices N [--memory 64G] [--device npu] -- train ARGUMENTS...
       %(prog)s --devices N [--memory 64G] [--device npu] -- pretrain_gpt.py ARGUMENTS..."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu plan", description=_DESCRIPTION, usage=_USAGE)
    result.add_argument("--devices", type=positive, required=True, help="number of devices in the job")
    result.add_argument(
        "--memory",
        type=byte_size,
        default=64 << 30,
        help="memory of each device, optionally with a suffix K, M or G (default: 64G)",
    )
    result.add_argument("--device", choices=("npu", "cuda"), default="npu", help="type of the devices")
    result.add_argument(
        "--expert-imbalance",
        type=Number("a non-negative number", float, 0.0, metavar="X"),
        default=1.0,
        help="number of tokens that an expert-parallel rank receives, as a multiple of an even share; the "
        "plan also reports the memory with an even share and in the worst case",
    )
    result.add_argument(
        "--devices-per-node", type=positive, default=8, help="number of devices in one machine"
    )
    result.add_argument(
        "--no-remedy", action="store_true", help="do not search for flags that would make the job fit"
    )
    result.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the full report to FILE, with sizes in bytes"
    )
    result.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page with each rank's memory over time to FILE",
    )
    result.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help=(
            "also write the allocations of the rank with the highest peak, with the source lines that "
            "request them, to FILE (a pickle that pytorch.org/memory_viz reads)"
        ),
    )
    result.add_argument(
        "--search",
        action="store_true",
        help=(
            "search for a layout of the model (parallel sizes, micro batch, recomputation, distributed "
            "optimizer): exclude layouts by closed-form estimates, dry-run the fastest remaining ones, and "
            "estimate their times"
        ),
    )
    result.add_argument(
        "--search-runs", type=positive, default=8, help="maximum number of layouts that --search dry-runs"
    )
    result.add_argument(
        "--hardware",
        choices=HARDWARE,
        help="devices for which --search estimates times (default: those of --device)",
    )
    result.add_argument(
        "--bench",
        type=Path,
        metavar="FILE",
        help="calibrate the time estimates of --search with a table that `bench --suite 3d --json FILE` "
        "wrote on devices of the same type",
    )
    result.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    return result


def main(argv: Sequence[str]) -> int:
    """Plan a job, and return the exit code.

    The code is 2 if the job does not fit or cannot run.

    Raises:
        UsageError: the input is invalid.
    """
    begin = time.monotonic()
    options = parser().parse_args(list(argv))
    if options.bench is not None and not options.search:
        raise UsageError(
            f"--bench {options.bench} requires --search, because it calibrates the times that "
            "--search estimates",
            remedy="Add --search, or remove --bench.",
        )
    output_files.require_writable(options.json, options.html, options.timeline, inputs=[options.bench])
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    job = Job.of(options.devices, command)
    require_covered(job, options.device)
    ranks = Ranks.on(options.device, options.devices_per_node)
    ranks = replace(ranks, curve=options.html is not None, imbalance=options.expert_imbalance)
    if options.search:
        return _search(job, ranks, options)
    plan = _planned(job, ranks, options)
    failed = plan.failed or plan.endless
    if failed is not None:
        print(f"megatron-npu plan: rank {failed.rank} of {job.devices} {_end_of(failed)}", file=sys.stderr)
        return 2
    if plan.too_full is not None and not options.no_remedy:
        _look_for_remedy(plan, ranks)
    plan.seconds = time.monotonic() - begin
    _write(plan, ranks, options)
    print("\n".join(plan.lines()), flush=True)
    return 0 if plan.too_full is None else 2


def require_covered(job: Job, device: str) -> None:
    """Reject jobs for which fake tensors cannot be used, which are ``train`` jobs and jobs with unknown token
    counts per expert.

    Raises:
        UsageError: the device is ``cuda`` and the job is one of these.
    """
    if device == "cuda" and job.family == TRAIN:
        raise UsageError(
            "--device cuda does not support train; only pretrain and stock scripts can be planned for CUDA",
            remedy="Use --device npu.",
        )
    if device == "cuda" and job.routes_freely and job.family != "megatron_core":
        raise UsageError(
            f"--device cuda does not support the experts of {job.family}, because the number of tokens per "
            "expert is known only at run time",
            remedy="Use --device npu.",
        )


def _search(job: Job, ranks: Ranks, options: Namespace) -> int:
    """Print the layouts that the search has tried in dry runs.

    Return 2 if none of them fits.
    """
    _reject_pages(options)
    name = options.hardware or hardware.default_of(options.device)
    calibration = Calibration()
    if options.bench is not None:
        place = (options.device, HARDWARE[name], options.devices_per_node)
        calibration = Calibration.of(options.bench, *place)
    search = Search(job, options.memory, options.devices_per_node, name, options.search_runs, calibration)
    found, lines = search.run(_DryRuns(ranks))
    if options.json is not None:
        files.write(options.json, json.dumps(search.to_json(found), indent=1) + "\n")
    print("\n".join(lines), flush=True)
    return 0 if any(map(search.fits, found)) else 2


def _reject_pages(options: Namespace) -> None:
    for flag in ("html", "timeline"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag} cannot be used with --search, which runs many layouts",
                remedy=f"Remove --{flag}, or plan one of the layouts without --search.",
            )


@dataclass(frozen=True)
class _DryRuns:
    """Runs the first and last ranks of layouts, and ranks of every stage if the order of passes is not yet
    known.

    Attributes:
        known: the order of the passes of layouts with equally many stages, chunks and micro batches.
    """

    ranks: Ranks
    known: dict[tuple[int, int, int], tuple[Order, ...] | None] = field(default_factory=dict)

    def __call__(self, job: Job) -> DryRun:
        kinds = job.representatives(by_batch=False)
        first = [listed[0] for listed in job.stages().values()]
        key = (job.pipeline, job.number("--num-layers-per-virtual-pipeline-stage", 0), job.words()[1])
        wanted = [min(kinds), max(kinds)] if key in self.known else [min(kinds), max(kinds), *first]
        found = self.ranks.run(job, dict.fromkeys(wanted))
        rows = [Row(rank, *kinds[rank], each) for rank, each in found.items()]
        failed = next((row for row in rows if row.failed), None)
        if failed is not None:
            return DryRun(None, _last_words(failed).splitlines()[-1])
        if key not in self.known:
            self.known[key] = _orders(found, first)
        return DryRun(max(row.needed for row in rows), orders=self.known[key])


def _orders(found: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> tuple[Order, ...] | None:
    orders = tuple(found[rank].get("order") or () for rank in ranks)
    return orders if all(orders) else None


def _write(plan: Plan, ranks: Ranks, options: Namespace) -> None:
    if options.json is not None:
        files.write(options.json, json.dumps(plan.to_json(), indent=1) + "\n")
    if options.html is not None:
        files.write(options.html, page.page(plan))
    if options.timeline is not None:
        replace(ranks, curve=True, snapshot=options.timeline).run(plan.job, [plan.fullest.rank])


def _planned(job: Job, ranks: Ranks, options: Namespace) -> Plan:
    plan = Plan(job, options.device, options.memory, options.devices_per_node, [])
    plan.rows = _rows(job, ranks)
    if plan.failed is not None or plan.endless is not None:
        return plan
    for row in plan.rows:
        row.fits = row.needed <= options.memory or _fits_when_short(job, ranks, row, options.memory)
    if "routing_most" in plan.fullest.found:
        plan.routed = _range(plan, ranks)
    return plan


def _rows(job: Job, ranks: Ranks) -> list[Row]:
    """Run one rank for each role in the job, and return the rows of the report.

    Stop at the first failure.

    To find mistakes early, the first and the last rank read all of the job's input before any rank trains.
    """
    kinds = job.representatives(ranks.by_batch)
    reading = [rank for rank in kinds if job.sender(rank) == rank]
    ends = list(dict.fromkeys((min(reading), max(reading))))
    passes = [(replace(ranks, check=True), ends)] * job.reads
    passes += [(ranks, ends), (ranks, [rank for rank in kinds if rank not in ends])]
    rows: list[Row] = []
    for how, numbers in passes:
        if not numbers:
            continue
        new = [Row(rank, *kinds[rank], found) for rank, found in how.run(job, numbers).items()]
        if any(row.failed for row in new):
            return new
        rows += [] if how.check else new
    return sorted(rows, key=lambda row: row.rank)


def _range(plan: Plan, ranks: Ranks) -> dict[float, int]:
    """Return the highest memory of a rank with the chosen imbalance, with even routing, and in the worst
    case.
    """
    row = plan.fullest
    found = {ranks.imbalance: row.needed}
    for multiple in (1.0, row.found["routing_most"]):
        if multiple not in found:
            again = replace(ranks, imbalance=multiple).run(plan.job, [row.rank])[row.rank]
            found[multiple] = Row(row.rank, row.stage, 1, again).needed
    return found


def _fits_when_short(job: Job, ranks: Ranks, row: Row, memory: int) -> bool:
    """Return True if a rank is able to train within ``memory`` bytes when its allocator releases unused
    memory.
    """
    if row.found["peak"] + row.buffers > memory:
        return False
    return (
        ranks.run(job, [row.rank], memory - row.buffers)[row.rank].get("updates", 0)
        > row.found["updates"] - 1
    )


def _look_for_remedy(plan: Plan, ranks: Ranks) -> None:
    full = plan.too_full
    assert full is not None

    def needed(job: Job) -> int | None:
        row = Row(full.rank, full.stage, 1, ranks.run(job, [full.rank])[full.rank])
        return None if row.failed else row.needed

    plan.remedy, plan.tried = remedies.found(plan.job, needed, plan.memory)


def _end_of(row: Row) -> str:
    if "asked_by" in row.found:
        return _last_words(row)
    return f"stops before it trains:\n{_last_words(row)}"


def _last_words(row: Row) -> str:
    if "asked_by" in row.found:
        size = re.search(r"Tried to allocate (\S+ \S+?)[. ]", str(row.failed))
        return (
            f"needs more memory than any device has: {row.found['asked_by']} requested "
            f"{size[1] if size else 'more'}, but a device was assumed to have at most {ENOUGH}. Shard the "
            "model over more devices, or reduce it."
        )
    log = row.found.get("log", "")
    errors = [line for line in log.splitlines() if "error:" in line]
    if row.found.get("code") == 2 and errors:
        return errors[-1]
    return "\n".join([*log.splitlines()[-12:], str(row.failed)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
