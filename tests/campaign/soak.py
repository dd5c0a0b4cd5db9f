"""Hours of ``pretrain``, ``serve`` and ``dashboard`` at once, with kills: what grows, and what stays behind?

python -m tests.campaign.soak --minutes 120 --seed 1 --json FILE: a training is killed at random moments and
goes on; a second server is, too; a server and a page answer all the time, clients that go away in the middle
included. Memory, descriptors, processes and the processor time of a step are sampled. The last samples are
compared with those of the first ten minutes (of a shorter soak, with its first quarter). With
``--requeue SECONDS``, a killed training waits as in a scheduler's queue, with the machine free.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from megatron_npu.checkpoint_files import checksums
from megatron_npu.pretrain.checkpoint import checkpoint_files
from tests.campaign.clients import DashboardClient, ServeClient
from tests.support import ports, tiny

SIZE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
)
BATCH = "--micro-batch-size 8 --global-batch-size 32 --lr 1e-4 --lr-decay-style constant --log-interval 10"
RUN = "--eval-interval 200 --eval-iters 1 --split 90,10,0 --no-plot --num-workers 1 --save-keep-last 2"
MANY = 60_000  # iterations: more than there is time for
EVERY = 5.0  # seconds between two samples
WITHIN = 0.03  # of what it was in the beginning
SETTLED = 30.0  # seconds after a start in which memory still grows, as it may
PATIENCE = 120.0  # seconds for what is killed or stopped to end, and for what is started to answer
SHARED = Path("/dev/shm")

Sample = dict[str, Any]


class Child:
    """A command of ours that runs beside the soak; started again, it writes on in its log."""

    def __init__(self, name: str, place: Path, *arguments: str, **variables: str) -> None:
        self.variables = variables
        self.name, self.place, self.log = name, place, place.parent / f"{name}.txt"
        self.arguments = arguments
        self.start()

    def start(self) -> None:
        """Start it, with its own folder for temporary files."""
        temporary = self.place.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        env = tiny.environment() | self.variables | {"TMPDIR": str(temporary)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                tiny.command(*self.arguments),
                env=env,
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.begun = time.monotonic()

    def told(self) -> str:
        """Return what it has printed."""
        return self.log.read_text(errors="replace")

    def end(self, number: int) -> int | None:
        """Send a signal; return the exit code, None: it did not end, and was killed."""
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(PATIENCE)
        self.process.kill()
        self.process.wait()
        return None

    def until(self, text: str) -> None:
        """Wait until it has printed something."""
        begun = time.monotonic()
        while text not in self.told():
            if self.process.poll() is not None or time.monotonic() - begun > PATIENCE:
                raise SystemExit(f"{self.name}: no {text!r}: {self.told()[-3000:]}")
            time.sleep(0.1)

    def sample(self) -> Sample | None:
        """Return what it takes now; None where it has just ended."""
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(self.process.pid)
            with process.oneshot():
                used = process.cpu_times()
                return {
                    "who": self.name,
                    "pid": process.pid,
                    "age": time.monotonic() - self.begun,
                    "rss": process.memory_info().rss,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                    "children": len(process.children(recursive=True)),
                    "cpu": used.user + used.system,
                }
        return None


class Soak:
    """What runs, what is done to it, and what was seen.

    Args:
        folder: for everything that is written; new.
        seed: decides what is killed, and when.
        requeue: seconds, on average, until a training that was killed is started again.

    Attributes:
        samples: in the order in which they were taken.
        faults: what should not have been.
        done: kills and requests, by kind.
    """

    def __init__(self, folder: Path, seed: int, requeue: float = 0.0) -> None:
        self.requeue = requeue
        self.rng = random.Random(seed)
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self.place = folder / "cwd"
        self.save = folder / "save"
        self.place.mkdir(parents=True)
        self._shared = set(os.listdir(SHARED))
        self._data = tiny.write_dataset(folder / "numbers")
        self._served = self._trained(folder / "served")
        self._ending = threading.Event()

    def _flags(self, save: Path, iterations: int, interval: int) -> list[str]:
        vocabulary = f"--tokenizer-type NullTokenizer --vocab-size {tiny.SIZE} --data-path {self._data}"
        steps = f"--train-iters {iterations} --save-interval {interval} --save {save} --load {save}"
        return ["pretrain", *f"{SIZE} {BATCH} {RUN} {vocabulary} {steps}".split()]

    def _trained(self, save: Path) -> Path:
        done = tiny.run(*self._flags(save, 10, 10))
        assert done.returncode == 0, done.stderr
        return save

    def run(self, seconds: float) -> None:
        """Soak for so long; then end all, and look at what is left."""
        port, page = ports.free_port(), ports.free_port()
        clients = [ServeClient(port, self.rng.random()), DashboardClient(page, self.rng.random())]
        threads = [threading.Thread(target=self._ask, args=(client,)) for client in clients]
        self.pretrain = Child("pretrain", self.place, *self._flags(self.save, MANY, 50))
        self.living: list[Child] = []
        try:
            self.pretrain.until("lm loss")
            self._serve(port, page)
            self.begun = time.monotonic()
            for thread in threads:
                thread.start()
            self._watch(seconds)
        finally:
            self._ending.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._end()

    def _serve(self, port: int, page: int) -> None:
        """Start what answers, and wait until it does."""
        served, saved = str(self._served), str(self.save)
        self.living.append(Child("serve", self.place, "serve", "--load", served, "--port", str(port)))
        self.living.append(Child("dashboard", self.place, "dashboard", saved, "--port", str(page)))
        self.living[0].until("Ctrl-C stops it")
        self.living[1].until("dashboard of")

    def _watch(self, seconds: float) -> None:
        """Take samples, and harm something now and then."""
        harm_at = self._next_harm()
        while (now := time.monotonic()) - self.begun < seconds:
            self._sample()
            for child in (*self.living, self.pretrain):
                if child.process.poll() is not None:
                    self.faults.append(f"{child.name} has ended: {child.told()[-600:]}")
                    child.start()
            if now > harm_at:
                self._harm()
                harm_at = self._next_harm()
            time.sleep(EVERY)

    def _next_harm(self) -> float:
        return time.monotonic() + self.rng.uniform(30, 120)

    def _sample(self) -> None:
        found = [sample for child in (*self.living, self.pretrain) if (sample := child.sample())]
        at = time.monotonic() - self.begun
        processes = len(list(self._processes()))
        logged = self._iterations()
        for sample in found:
            self.samples.append(sample | {"at": at, "processes": processes, "iteration": logged})

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/cwd") == str(self.place):
                    yield process

    def _iterations(self) -> int:
        """Return the newest iteration that was logged."""
        metrics = self.save / "metrics.jsonl"
        with metrics.open("rb") as lines:
            lines.seek(max(0, metrics.stat().st_size - 20_000))
            rows = [line for line in lines.read().splitlines() if b'"event": "train"' in line]
        for row in reversed(rows):
            with contextlib.suppress(ValueError):
                return int(json.loads(row)["iteration"])
        return 0

    # -- harm

    def _harm(self) -> None:
        """Kill something, see that nothing of it stays, and let it go on."""
        harm = self.rng.choice(
            (self._kill_rank, self._kill_rank, self._kill_worker, self._stop, self._second)
        )
        self.done[harm.__name__[1:]] += 1
        harm()

    def _kill_rank(self) -> None:
        self.pretrain.process.kill()
        self._go_on(-signal.SIGKILL)

    def _stop(self) -> None:
        self.pretrain.process.terminate()
        self._go_on(128 + signal.SIGTERM, -signal.SIGTERM)

    def _kill_worker(self) -> None:
        """SIGKILL of a process that prepares data: the run names it."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.pretrain.process.pid).children(recursive=True)
            workers = [child for child in children if child.name() == "pt_data_worker"]
            if not workers:
                return
            self.rng.choice(workers).kill()
            self._go_on(1)
            if "is killed by signal" not in self.pretrain.told():
                self.faults.append("nobody has named the worker that was killed")

    def _go_on(self, *codes: int) -> None:
        """Wait for the end of a training that was harmed; start it again."""
        try:
            code = self.pretrain.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.faults.append("the training does not end")
            self.pretrain.process.kill()
            self.pretrain.process.wait()
        else:
            if code not in codes:
                self.faults.append(f"the training has ended with {code}, not {codes}")
        self._require_ended({child.process.pid for child in self.living})
        self._wait_in_queue()
        newest = int((self.save / checkpoint_files.TRACKER).read_text())
        before = len(self.pretrain.told())
        self.pretrain.start()
        begun = time.monotonic()
        said = f"resuming from iteration {newest}"
        while said not in self.pretrain.told()[before:]:
            if time.monotonic() - begun > PATIENCE or self.pretrain.process.poll() is not None:
                self.faults.append(f"not {said}: {self.pretrain.told()[before:][-600:]}")
                return
            time.sleep(0.2)

    def _wait_in_queue(self) -> None:
        """Leave the training out for some time; what answers is sampled on."""
        until = time.monotonic() + self.rng.uniform(0, 2 * self.requeue)
        while time.monotonic() < until:
            self._sample()
            time.sleep(EVERY)

    def _require_ended(self, living: set[int]) -> None:
        """See that nothing but what lives is there, in some seconds."""
        begun = time.monotonic()
        while left := [each for each in self._processes() if each.pid not in living]:
            if time.monotonic() - begun > PATIENCE / 4:
                self.faults.append(f"left behind: {[each.cmdline()[-3:] for each in left]}")
                for each in left:
                    each.kill()
                return
            time.sleep(0.1)

    def _second(self) -> None:
        """SIGKILL of a second server, while it loads or when it answers."""
        port = ports.free_port()
        other = Child("second", self.place, "serve", "--load", str(self._served), "--port", str(port))
        time.sleep(self.rng.uniform(0, 10))
        if other.process.poll() is not None:
            self.faults.append(f"the second server has ended: {other.told()[-600:]}")
        other.end(signal.SIGKILL)

    def _ask(self, client: ServeClient | DashboardClient) -> None:
        """Ask until the soak ends; what is answered must be what was answered first."""
        while not self._ending.wait(client.pause()):
            kind, fault = client.ask()
            self.done[kind] += 1
            if fault:
                self.faults.append(f"{kind}: {fault}")

    # -- the end

    def _end(self) -> None:
        if self.pretrain.end(signal.SIGTERM) is None:
            self.faults.append("the training does not end on SIGTERM")
        for child in self.living:
            number = signal.SIGTERM if child.name == "serve" else signal.SIGINT
            if (code := child.end(number)) != 0:
                self.faults.append(f"{child.name} has ended with {code}: {child.told()[-600:]}")
        self._require_ended(set())
        for child in (self.pretrain, *self.living):
            if "Traceback (most recent call last)" in child.told():
                self.faults.append(f"{child.name}: a traceback")
        self._require_nothing_left()

    def _require_nothing_left(self) -> None:
        partial = [path.name for path in self.save.iterdir() if path.name.endswith(".partial")]
        temporary = os.listdir(self.place.parent / "tmp")
        shared = sorted(set(os.listdir(SHARED)) - self._shared)
        damaged = [str(found) for each in self.save.glob("iter_*") if (found := checksums.damaged(each))]
        steps = Counter(row["iteration"] for row in tiny.rows(self.save / "metrics.jsonl"))
        twice = [step for step, times in steps.items() if times > 1]
        for what, left in {"temporary": temporary, "damaged": damaged, "logged twice": twice}.items():
            if left:
                self.faults.append(f"{what}: {left[:5]}")
        if len(partial) > 2:  # of a run that is stopped while it saves: gone at the next start
            self.faults.append(f"partial: {partial}")
        if shared:
            print(f"shared memory that was not there before, perhaps of others: {shared[:5]}")


Row = tuple[str, str, float, float]


def compared(samples: list[Sample], window: float) -> list[Row]:
    """Return what was measured in the first and in the last ``window`` seconds, as medians.

    A training begins anew after each kill: only samples count that are ``SETTLED`` seconds after its start.
    """
    last = max(sample["at"] for sample in samples)
    rows: list[Row] = []
    for who in ("serve", "dashboard", "pretrain"):
        own = [sample for sample in samples if sample["who"] == who and sample["age"] > SETTLED]
        first, end = [s for s in own if s["at"] <= window], [s for s in own if s["at"] > last - window]
        if not first or not end:
            continue
        for what in ("rss", "fds", "threads", "children"):
            rows.append((who, what, *(statistics.median(s[what] for s in part) for part in (first, end))))
        if who == "pretrain":
            rows.append((who, "ms of a processor for a step", _step(first), _step(end)))
    both = [[s["processes"] for s in samples if inside(s["at"])] for inside in _windows(window, last)]
    rows.append(("all", "processes", *map(statistics.median, both)))
    return rows


def _windows(window: float, last: float) -> Any:
    return (lambda at: at <= window), (lambda at: at > last - window)


def _step(samples: list[Sample]) -> float:
    """Return the processor time of an iteration in milliseconds: all that was used, for all iterations.

    Iterations are logged by tens, so each process counts from its first new log to its last one.
    """
    used = steps = 0.0
    for _, group in itertools.groupby(samples, key=lambda sample: sample["pid"]):
        own = list(group)
        logged = [now for before, now in itertools.pairwise(own) if now["iteration"] > before["iteration"]]
        if len(logged) > 1:
            used += logged[-1]["cpu"] - logged[0]["cpu"]
            steps += logged[-1]["iteration"] - logged[0]["iteration"]
    return 1000 * used / steps if steps else float("nan")


def main() -> int:
    """Print what was compared; return the number of faults and of what has changed too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--requeue", type=float, default=0, help="seconds, on average, before a killed training starts again"
    )
    parser.add_argument("--json", type=Path, help="write all samples there")
    given = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # what it has started ends, too
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), given.seed, given.requeue)
        begun = time.monotonic()
        try:
            soak.run(60 * given.minutes)
        finally:
            lasted = time.monotonic() - begun
            if given.json:
                content = {
                    "seconds": lasted,
                    "done": soak.done,
                    "faults": soak.faults,
                    "samples": soak.samples,
                }
                given.json.write_text(json.dumps(content) + "\n")
    return told(soak, lasted)


def told(soak: Soak, lasted: float) -> int:
    """Print the table, and what was done; return how many things were not as they should be."""
    print("| process | what | first | last | change |\n|---|---|---|---|---|")
    wrong = 0
    for who, what, first, last in compared(soak.samples, min(600.0, lasted / 4)):
        change = (last - first) / first if first else last
        wrong += change > WITHIN
        print(f"| {who} | {what} | {first:,.6g} | {last:,.6g} | {change:+.1%} |")
    print(f"{lasted / 60:.0f} minutes; {dict(sorted(soak.done.items()))}")
    for fault in soak.faults:
        print(f"fault: {fault}")
    print(f"{len(soak.faults)} faults; more than {WITHIN:.0%} above the beginning: {wrong}")
    return len(soak.faults) + wrong


if __name__ == "__main__":
    sys.exit(main())
