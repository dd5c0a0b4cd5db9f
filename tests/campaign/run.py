"""The campaign: runs are killed, stopped, starved and spoilt in a loop, and what is left is looked at.

    python -m tests.campaign.run [--minutes 5] [--seed 0] [--only kill,corrupt] [--json FILE]

Not part of the suite. Two trainings of a tiny model, of one process and of two, go on from their checkpoints
after each harm, until they end; then their losses must be those of a training that nobody has harmed, to the
bit. After each harm nothing may be left running, no checkpoint be damaged (but the one that was spoilt), no
partial file survive the next start, and the harm must have been told without a traceback. The exit code is 1
if anything was lost, hung or left behind. The seed of each trial is printed: --seed repeats it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_npu.training import checkpoint_files, checksums
from tests.end_to_end import tiny

ITERATIONS, INTERVAL = 48, 4
PATIENCE = 180.0  # seconds until what does not end counts as hung
FAULTS = ("lost", "hung", "left behind", "traceback", "unnamed")
CHANGES = f"--train-iters {ITERATIONS} --save-interval {INTERVAL} --eval-iters 0 --no-plot"


class FaultError(Exception):
    """A trial has not gone as it must: one of ``FAULTS``, and what exactly."""


@dataclass
class Job:
    """A training that is harmed until it ends.

    Attributes:
        ranks: its processes.
        folder: what it saves into, and its data.
        calm: the losses that it must have.
        rng: decides what happens.
    """

    ranks: int
    data: Path
    folder: Path
    calm: dict[int, float]
    rng: random.Random
    ended: int = 0

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def command(self, *more: str) -> list[str]:
        flags = [*tiny.flags_for(self.data), *CHANGES.split()]
        places = ["--save", str(self.save), "--load", str(self.save)]
        return tiny.command("pretrain", *flags, *places, *more, processes=self.ranks)

    @contextlib.contextmanager
    def running(self, *more: str, limit: tuple[int, int] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Start it in a session of its own, in which nothing may be left after the block."""

        def restrict() -> None:
            if limit is not None:
                resource.setrlimit(limit[0], (limit[1], limit[1]))

        with open(self.log, "wb") as log:
            process = subprocess.Popen(
                self.command(*more),
                env=tiny.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=restrict,
            )
        try:
            yield process
            self.wait(process)
        finally:
            left = remaining(process.pid, 15)
            for other in left:
                other.kill()
        if left:
            raise FaultError("left behind", f"{[each.name() for each in left if each.is_running()]}")

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise FaultError("hung", f"{PATIENCE:.0f} s after the harm") from None

    def rows(self) -> int:
        metrics = self.save / "metrics.jsonl"
        return metrics.read_bytes().count(b'"event": "train"') if metrics.exists() else 0

    def progress(self, process: subprocess.Popen[bytes], rows: int) -> bool:
        """Wait until it has trained so many iterations more; return whether it still runs."""
        before, end = self.rows(), time.monotonic() + PATIENCE
        while process.poll() is None and self.rows() < before + rows:
            if time.monotonic() > end:
                process.kill()
                raise FaultError("hung", "no iteration")
            time.sleep(0.02)
        return process.poll() is None

    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def is_over(self) -> bool:
        return max(checkpoint_files.iterations(self.save), default=0) == ITERATIONS

    def check(self) -> None:
        """Look at what is there between two runs."""
        for iteration in checkpoint_files.iterations(self.save):
            folder = checkpoint_files.directory(self.save, iteration)
            if found := checksums.damaged(folder) or checksums.incomplete(folder):
                raise FaultError("lost", f"{folder.name}: {found}")
        losses = tiny.losses(self.save / "metrics.jsonl") if self.rows() else {}
        if wrong := [number for number, loss in losses.items() if loss != self.calm[number]]:
            raise FaultError("lost", f"the loss of iteration {wrong[0]} is another")

    def renew(self) -> None:
        """Begin again where it has ended, or keep the newest checkpoints alone."""
        if self.is_over():
            left = [path.name for path in self.save.iterdir() if path.name.endswith(".partial")]
            if left:
                raise FaultError("left behind", str(left))
            shutil.rmtree(self.save)
            self.ended += 1
        for iteration in checkpoint_files.iterations(self.save)[:-3]:
            shutil.rmtree(checkpoint_files.directory(self.save, iteration))


def remaining(session: int, seconds: float) -> list[psutil.Process]:
    """Return the processes of a session that are there after so many seconds."""
    end = time.monotonic() + seconds
    while found := list(_of_session(session)):
        if time.monotonic() > end:
            return found
        time.sleep(0.05)
    return []


def _of_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _rank(job: Job, process: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """Return a rank's process: the only one, or a child of torchrun."""
    if job.ranks == 1:
        return psutil.Process(process.pid)
    children = psutil.Process(process.pid).children()
    return next(each for each in children if each.environ().get("RANK") == str(rank))


# -- harms: each returns when the run that it has harmed has ended


def kill(job: Job) -> None:
    """SIGKILL of a rank, anywhere: between steps, in one, in a save."""
    rank = job.rng.randrange(job.ranks)
    with job.running() as process:
        if job.progress(process, job.rng.randint(1, 2 * INTERVAL)):
            time.sleep(job.rng.random() * 0.3)
            with contextlib.suppress(psutil.Error):
                _rank(job, process, rank).kill()
    named = rf"ends: rank {rank} |rank +: {rank} .*\n.*-9"  # by the others, or by torchrun if it was quicker
    if job.ranks > 1 and not job.is_over() and not re.search(named, job.told()):
        raise FaultError("unnamed", f"rank {rank}")


def kill_launcher(job: Job) -> None:
    """SIGKILL of all that was started: the launcher and, a moment later, whatever of it still runs."""
    with job.running() as process:
        if job.progress(process, job.rng.randint(1, INTERVAL)):
            process.kill()
            for other in remaining(process.pid, 2) if job.ranks > 1 else []:
                with contextlib.suppress(psutil.Error):
                    other.kill()  # torchrun's children do not end with it


def kill_writer(job: Job) -> None:
    """SIGKILL of a process that writes a checkpoint, as for want of memory."""
    with job.running() as process:
        end = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(psutil.Error, StopIteration):
                for child in _rank(job, process, job.rng.randrange(job.ranks)).children():
                    child.kill()
                    end = 0
    if job.rows() and process.returncode == 0 and not job.is_over():
        raise FaultError("unnamed", "a killed writer")


def signals(job: Job) -> None:
    """SIGINT, SIGTERM or SIGHUP to the whole group, as a terminal and a batch system send it."""
    number = job.rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    more = ["--exit-signal-handler"] if job.rng.random() < 0.5 else []
    with job.running(*more) as process:
        if job.progress(process, job.rng.randint(1, INTERVAL)):
            time.sleep(job.rng.random() * 0.2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    if job.ranks == 1:
        untraced(job)


def freeze(job: Job) -> None:
    """SIGSTOP of everything for seconds, as a machine that is put to sleep; then it goes on."""
    with job.running() as process:
        if job.progress(process, 1):
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(job.rng.uniform(0.5, 3))
            os.killpg(process.pid, signal.SIGCONT)
            if job.progress(process, 2):
                os.killpg(process.pid, signal.SIGKILL)


def fill(job: Job) -> None:
    """No file may become larger than so many bytes: each write in turn meets a full disk."""
    limit = (resource.RLIMIT_FSIZE, job.rng.choice((2_000, 20_000, 60_000, 100_000, 200_000)))
    with job.running(limit=limit) as process:
        pass
    if process.returncode == 0 and not job.is_over():
        raise FaultError("unnamed", "a disk that is full")
    if job.ranks == 1:
        untraced(job)


def starve(job: Job) -> None:
    """Few open files: what cannot be opened ends the run, in whatever place."""
    with job.running(limit=(resource.RLIMIT_NOFILE, job.rng.randint(12, 60))) as process:
        if job.progress(process, 2):
            process.terminate()


def corrupt(job: Job) -> None:
    """A bit flipped, or a file cut or gone, in the newest checkpoint: refused, then passed over on demand."""
    there = checkpoint_files.iterations(job.save)
    if len(there) < 2:
        return kill(job)
    files = [path for path in checkpoint_files.directory(job.save, there[-1]).iterdir() if path.is_file()]
    path = job.rng.choice(sorted(files))
    content = bytearray(path.read_bytes())
    how = job.rng.choice(("flip", "cut", "remove"))
    if how == "flip":
        content[job.rng.randrange(len(content))] ^= 1 << job.rng.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: job.rng.randrange(len(content))])
    else:
        path.unlink()
    # a flipped bit in the table of sums may be a space's: then nothing is wrong; without it nobody can tell
    harmless = path.name == checksums.NAME
    with job.running() as process:
        if harmless and job.progress(process, 1):
            process.terminate()
    if not harmless and process.returncode == 0:
        raise FaultError("lost", f"{path.name} was loaded after {how}")
    untraced(job)
    with job.running("--load-last-good") as process:
        if job.progress(process, 1):
            process.terminate()
    for iteration in there:
        folder = checkpoint_files.directory(job.save, iteration)
        if folder.exists() and checksums.damaged(folder):
            shutil.rmtree(folder)  # not saved anew yet
            last = max(checkpoint_files.iterations(job.save))
            (job.save / checkpoint_files.TRACKER).write_text(f"{last}\n")
    return None


def untraced(job: Job) -> None:
    if "Traceback (most recent call last)" in job.told() and "torch.distributed.elastic" not in job.told():
        raise FaultError("traceback", job.told()[-2000:])


HARMS: dict[str, Callable[[Job], None]] = {
    each.__name__: each for each in (kill, kill_launcher, kill_writer, signals, freeze, fill, starve, corrupt)
}


@dataclass
class Tally:
    """What was seen: trials and faults of each harm."""

    trials: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )

    def table(self) -> str:
        rows = ["| harm | trials | " + " | ".join(FAULTS) + " |", "|---|---|" + "---|" * len(FAULTS)]
        for name, count in sorted(self.trials.items()):
            found = " | ".join(str(self.faults[name][fault]) for fault in FAULTS)
            rows.append(f"| {name} | {count} | {found} |")
        return "\n".join(rows)


def trial(job: Job, name: str) -> None:
    HARMS[name](job)
    job.check()
    job.renew()


def jobs(folder: Path) -> list[Job]:
    """Return the trainings, with the losses that they have when nobody harms them."""
    found = []
    data = tiny.write_dataset(folder / "numbers")
    for ranks in (1, 2):
        place = folder / f"ranks{ranks}"
        place.mkdir()
        calm = Job(ranks, data, place / "calm", {}, random.Random(0))
        calm.folder.mkdir()
        with calm.running() as process:
            pass
        if process.returncode:
            raise SystemExit(calm.told())
        found.append(Job(ranks, data, place, tiny.losses(calm.save / "metrics.jsonl"), calm.rng))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each one has the next")
    parser.add_argument("--only", default=",".join(HARMS), help="harms, with commas")
    parser.add_argument("--json", type=Path, help="write the counts there")
    args = parser.parse_args()
    names, tally, seed = args.only.split(","), Tally(), args.seed
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        both, end = jobs(Path(folder)), time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            rng = random.Random(seed)
            name, job = names[seed % len(names)], both[rng.randrange(2)]
            job.rng = rng
            label = f"{name}, {job.ranks} rank{'s' if job.ranks > 1 else ''}"
            tally.trials[label] += 1
            try:
                trial(job, name)
                print(f"seed {seed}: {label}: ok", flush=True)
            except FaultError as fault:
                kind, what = fault.args
                tally.faults[label][kind] += 1
                print(f"seed {seed}: {label}: {kind}: {what}", flush=True)
                shutil.rmtree(job.save, ignore_errors=True)
            seed += 1
    print(f"\n{tally.table()}\n\ntrainings that ended as if unharmed: {sum(job.ended for job in both)}")
    counts = {"trials": tally.trials, "faults": tally.faults, "ended": sum(job.ended for job in both)}
    if args.json:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if any(tally.faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
