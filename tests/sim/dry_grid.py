"""Full simulated runs against dry runs of the same ranks, to the byte, on request.

    python -m tests.sim.dry_grid [--layout NAME ...] [--program NAME ...] [--output FILE]
    python -m tests.sim.dry_record            # docs/records/plan.md from benchmarks/results/plan/grid.json

Two iterations of a small model in each layout of ``dry_layouts``: once on simulated NPUs that compute and
communicate, and once each rank alone, with nothing above 16 KiB computed, by the words that ``plan`` makes of
the command line. Peak and reserved memory of each rank, as torch_npu's allocator says them, must be equal;
the exit code is 1 if one is not. A process for each Megatron imports it, and is forked for each rank.

Each layout is written to the output when it is done. A later call with the same output skips the layouts that
were compared at the commit that last changed what they depend on, so that an interrupted run can be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from megatron_npu import plugin
from megatron_npu.base import files, settings
from megatron_npu.planning.job import Job
from tests.sim.dry_layouts import CHECKOUTS, DRIVER, LAYOUTS, TRAIN, Layout
from tests.support.ports import free_port

COMPUTED = 16 << 10  # bytes
_LONGEST = 1800  # seconds that a rank may take
# what a comparison depends on: all of the package but the parts of a plan that no rank of it runs; what git
# excludes, it excludes from all paths of a call
_PATHS = (
    ("megatron_npu", ":(exclude)megatron_npu/planning"),
    (
        "megatron_npu/planning/rank",
        *(
            f":(exclude)megatron_npu/planning/rank/{name}.py"
            for name in ("before_training", "cuda", "host_process")
        ),
    ),
    ("megatron_npu/planning/job.py", "tests/sim/dry_layouts.py"),
)
_IMPORTED = (
    "megatron_npu.commands.cli",
    "megatron_npu.planning.rank.measurements",
    "megatron_npu.planning.rank.npu",
)
_OF_DRIVER = ("megatron_npu.pretrain.run.pretrain",)
_OF_STOCK = ("megatron.training",)
_OF_TRAIN = ("transformers", "megatron_npu.finetune.run.command")
_OF = {"driver": _OF_DRIVER, "stock": _OF_STOCK, "train": _OF_TRAIN}


def compared(layout: Layout, folder: Path) -> list[dict]:
    """Return of each rank of a layout its peak and reserved memory, full and dry, or the end of its log.

    Dry runs the rank that stands for it in a plan; and if that one has other memory, the rank itself.
    """
    ranks, command = layout.ranks, layout.command(folder)
    job = Job.of(ranks, command)
    dry_words, _ = job.words()

    def dry(rank: int) -> Path:
        child, path = _forked(layout, dry_words, folder / f"dry{rank}", rank)
        _wait([child])
        return path

    full = [_forked(layout, command, folder / f"full{rank}", rank) for rank in _numbers(ranks)]
    _wait([child for child, _ in full])
    rows = []
    for _, (first, *others) in job.classes():
        path = dry(first)
        rows.append({"rank": first} | _row(full[first][1], path))
        for rank in others:
            row = _row(full[rank][1], path)
            if row.get("equal") is False:
                own = _row(full[rank][1], dry(rank))
                row = own | {"representative": row["dry"]} if own.get("equal") else row
            rows.append({"rank": rank} | row)
    return sorted(rows, key=lambda row: row["rank"])


def _numbers(ranks: int) -> Iterator[int]:
    os.environ["MASTER_PORT"] = str(free_port())
    yield from range(ranks)


def _wait(children: list[int]) -> None:
    """Wait for all; when one has ended badly, or it takes too long, nobody waits for the others."""
    left, end, bad = set(children), time.monotonic() + _LONGEST, False
    while left:
        for child in tuple(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                bad = bad or status != 0
        if left and (bad or time.monotonic() > end):
            time.sleep(2)  # the others may say what is wrong
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        time.sleep(0.05)


def _row(full: Path, dry: Path) -> dict:
    row: dict = {}
    for kind, path in (("full", full), ("dry", dry)):
        report: dict = json.loads(path.read_text()) if path.exists() else {"code": None}
        if report["code"] != 0 or not report["updates"]:
            said = path.with_suffix(".log").read_text(errors="replace")[-1500:]
            return {"failed": f"{kind}: {said} {report.get('error')}"}
        row[kind] = {key: report[key] for key in ("peak", "reserved", "allocations")}
        row[kind]["sent"] = sum(work["bytes"] for work in report["communication"].values())
    row["equal"] = all(row["full"][key] == row["dry"][key] for key in ("peak", "reserved"))
    return row


def _forked(layout: Layout, command: list[str], path: Path, rank: int) -> tuple[int, Path]:
    """Start a rank in a fork of this process, which has imported all that it needs; the path says if dry."""
    from megatron_npu.planning.rank import npu
    from megatron_npu.sim import build

    dry, ranks = path.name.startswith("dry"), layout.ranks
    # the same share of the tokens for the experts of a rank, in both
    told = {"words": command, "output": str(path), "alone": dry, "imbalance": layout.imbalance(rank)}
    batches = path.parent / "batches"
    batches.mkdir(exist_ok=True)
    told["batches"] = str(batches)
    path.with_suffix(".spec").write_text(json.dumps(told))
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child, path
    with contextlib.suppress(BaseException):
        log = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        place |= {"MASTER_ADDR": "127.0.0.1", settings.WATCHDOG.name: 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.chdir(path.parent)
        if dry:  # read when the first operation asks for it
            build.runtime_library().sim_set(b"dry", str(COMPUTED).encode())
        try:
            npu.main(str(path.with_suffix(".spec")))
        except BaseException:
            traceback.print_exc()
    os._exit(1)


def commit(lists: tuple[tuple[str, ...], ...] = _PATHS) -> str:
    """Return the last commit of what a comparison depends on, with a plus sign if that has changed since."""

    def said(*words: str) -> str:
        git = ["git", "-C", str(CHECKOUTS.parent), *words]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    found = [said("log", "-1", "--format=%ct %h", "--abbrev=8", "--", *paths) for paths in lists]
    newest = max(found, key=lambda line: int(line.split()[0])).split()[1]
    return newest + "+" * any(said("status", "--porcelain", "--", *paths) for paths in lists)


def stamped(row: dict, of: str) -> dict:
    """Return a row with its day and commit."""
    return row | {"day": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "commit": of}


def is_done(row: dict | None, of: str) -> bool:
    """Return True if a layout need not be compared again."""
    if row is None or row["commit"] != of or of.endswith("+"):
        return False
    return not any("failed" in rank for rank in row["ranks"])


def write(output: Path, name: str, row: dict) -> None:
    """Add a row to the output, to which other processes may write theirs at the same time."""
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files.write(output, json.dumps(read(output) | {name: row}, indent=1) + "\n")


def read(output: Path) -> dict[str, dict]:
    """Return the rows of an output, by the names of their layouts."""
    return json.loads(output.read_text()) if output.exists() else {}


def of_one_program(layouts: list[Layout], output: Path) -> int:
    """Compare layouts of one program in this process, which is on simulated NPUs; return how many differ."""
    importlib.import_module("torch_npu")  # registers torch.npu
    kind = layouts[0].kind
    if kind == "stock":  # as `megatron-npu run` does
        plugin.install()
        sys.path.insert(1, str((CHECKOUTS / layouts[0].program).resolve()))
    for name in (*_IMPORTED, *_OF[kind]):
        importlib.import_module(name)
    wrong, of = 0, commit()
    for layout in layouts:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows = compared(layout, Path(folder))
        name = next(name for name, each in LAYOUTS.items() if each is layout)
        for row in rows:
            wrong += not row.get("equal")
            said = row.get("failed") or f"{row['full']} {row['dry']}"
            print(f"{name:32} rank {row['rank']} {'equal' if row.get('equal') else 'NOT EQUAL'} {said}")
        print(f"{name:32} {time.monotonic() - begin:.0f} s", flush=True)
        write(output, name, stamped({"ranks": rows}, of))
    return wrong


def _started(program: str, names: list[str], output: Path) -> None:
    """Compare layouts of a program in a process of its own."""
    words = [
        sys.executable,
        "-m",
        "tests.sim.dry_grid",
        "--here",
        "--output",
        str(output),
        "--layout",
        *names,
    ]
    environment = dict(os.environ)
    if program not in (DRIVER, TRAIN):
        path = str((CHECKOUTS / program).resolve())
        environment[settings.MEGATRON_PATH.name] = path
        if LAYOUTS[names[0]].kind == "driver":
            environment["PYTHONPATH"] = os.pathsep.join([path, str(CHECKOUTS.parent)])
    launcher = [sys.executable, "-m", "megatron_npu", "sim", "--"]
    subprocess.run([*launcher, *words], env=environment, check=False, timeout=6 * 3600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    programs = sorted({layout.program for layout in LAYOUTS.values()})
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS)
    parser.add_argument("--program", nargs="+", choices=programs, help="all layouts of these")
    parser.add_argument("--output", type=Path, help="also write the numbers to this JSON file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.layout or [
        name for name, each in LAYOUTS.items() if each.program in (options.program or programs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder, "grid.json")
        if options.here:
            return int(of_one_program([LAYOUTS[name] for name in names], output) > 0)
        output.parent.mkdir(parents=True, exist_ok=True)
        done, of = read(output), commit()
        left = [name for name in names if not is_done(done.get(name), of)]
        print(f"{len(names) - len(left)} of {len(names)} layouts were compared at {of}", flush=True)
        for program in dict.fromkeys(LAYOUTS[name].program for name in left):
            own = [name for name in left if LAYOUTS[name].program == program]
            _started(program, own, output.resolve())
        rows = [rank for name in names for rank in read(output).get(name, {"ranks": [{}]})["ranks"]]
    return int(not all(row.get("equal") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
