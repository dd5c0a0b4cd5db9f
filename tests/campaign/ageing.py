"""Is an old process as fast as a new one? ``serve``, ``dashboard`` and ``pretrain``, under any load.

python -m tests.campaign.ageing --minutes 30 --json FILE: a training, a server and a page work for that long,
with clients. Then two new processes of the same command are started beside each of them, and the three work
in short turns: while one takes its steps or answers, the others stand still (a training by SIGSTOP). The
processor time of a step or a request is compared between neighbouring turns: the load of the machine falls
out. How much the two new processes differ from each other shows what the measurement can tell.

The new trainings resume from the newest checkpoint of the old one: the same weights and samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_npu.pretrain.checkpoint import checkpoint_files
from tests.campaign.clients import DashboardClient, ServeClient
from tests.campaign.soak import BATCH, MANY, RUN, SIZE, WITHIN, Child
from tests.support import ports, tiny

AGES = ("old", "new", "new too")
STEPS = 25  # iterations of a training's turn: each has one save
MORE = {
    "serve": 3,
    "dashboard": 3,
    "pretrain": 1,
}  # rounds of a kind for each of --rounds: turns of a server are short
LOGGED = 5  # iterations between two log events, at which turns begin and end
ANSWERS = {"serve": 8, "dashboard": 30}  # requests of a turn
LONGEST = 240.0  # seconds of a turn; the watchdog's limit is 300


@dataclass
class Worker:
    """A process that takes turns.

    Attributes:
        child: the command.
        turn: does a turn's work; returns the steps or requests, and their seconds of a processor and a clock.
        spent: what each turn took: milliseconds of a processor and of a clock for a step or a request.
    """

    child: Child
    turn: Callable[[Worker], tuple[int, float, float]]
    spent: list[tuple[float, float]] = field(default_factory=list)

    def take(self) -> None:
        """Take a turn, and note what it took."""
        steps, processor, clock = self.turn(self)
        self.spent.append((1000 * processor / steps, 1000 * clock / steps))

    def processes(self) -> list[psutil.Process]:
        """Return the process and those that it has started."""
        own = psutil.Process(self.child.process.pid)
        return [own, *own.children(recursive=True)]

    def used(self) -> float:
        """Return the seconds of a processor that they have used, to the nanosecond."""
        total = 0.0
        for each in self.processes():
            with contextlib.suppress(OSError):
                total += time.clock_gettime((~each.pid << 3) | 2)  # as clock_getcpuclockid says
        return total

    def signal(self, number: int) -> None:
        """Send a signal to all of them."""
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)


class Folders:
    """Where the commands run and write; what they are given."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "cwd"
        self.place.mkdir(parents=True)
        self.folder, self.data = folder, tiny.write_dataset(folder / "numbers")
        self.served = folder / "served"
        done = tiny.run(*self.training(self.served, 10))
        assert done.returncode == 0, done.stderr

    def training(self, save: Path, iterations: int = MANY) -> list[str]:
        """Return the command line of a training that goes on from its own folder."""
        vocabulary = f"--tokenizer-type NullTokenizer --vocab-size {tiny.SIZE} --data-path {self.data}"
        steps = f"--train-iters {iterations} --save-interval {STEPS} --log-interval {LOGGED}"
        words = f"{SIZE} {BATCH} {RUN} {vocabulary} {steps} --save {save} --load {save}"
        return ["pretrain", *words.split()]

    def child(self, name: str, *arguments: str) -> Child:
        """Start a command."""
        return Child(name, self.place, *arguments)


def _iteration(metrics: Path) -> int:
    """Return the newest iteration that a training has logged."""
    with metrics.open("rb") as lines:
        lines.seek(max(0, metrics.stat().st_size - 8_000))
        for row in reversed(lines.read().split(b"\n")):
            if b'"event": "train"' in row:
                with contextlib.suppress(ValueError):
                    return int(json.loads(row)["iteration"])
    return 0


def _trained(metrics: Path) -> Callable[[Worker], tuple[int, float, float]]:
    """Return what lets a training go on for a turn, from one log event to another."""

    def event(worker: Worker, least: int) -> tuple[int, float, float]:
        begun = time.monotonic()
        while (now := _iteration(metrics)) < least:
            if worker.child.process.poll() is not None or time.monotonic() - begun > LONGEST:
                raise SystemExit(f"{worker.child.name} does not go on: {worker.child.told()[-2000:]}")
            time.sleep(0.005)
        return now, worker.used(), time.monotonic()

    def turn(worker: Worker) -> tuple[int, float, float]:
        worker.signal(signal.SIGCONT)
        try:
            first = event(worker, _iteration(metrics) + LOGGED)
            last = event(worker, first[0] + STEPS)
        finally:
            worker.signal(signal.SIGSTOP)
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]

    return turn


def _answered(asks: list[Callable[[], str]], times: int) -> Callable[[Worker], tuple[int, float, float]]:
    """Return what asks a server for a turn."""

    def turn(worker: Worker) -> tuple[int, float, float]:
        processor, begun = worker.used(), time.monotonic()
        for number in range(times):
            if fault := asks[number % len(asks)]():
                raise SystemExit(f"{worker.child.name}: {fault}")
        return times, worker.used() - processor, time.monotonic() - begun

    return turn


def _server(folders: Folders, age: str) -> tuple[Worker, ServeClient]:
    port = ports.free_port()
    words = ("serve", "--load", str(folders.served), "--port", str(port))
    child, client = folders.child(f"serve, {age}", *words), ServeClient(port, 0.0)
    child.until("Ctrl-C stops it")
    return Worker(child, _answered([client.whole], ANSWERS["serve"])), client


def _page(folders: Folders, save: Path, age: str) -> tuple[Worker, DashboardClient]:
    port = ports.free_port()
    child = folders.child(f"dashboard, {age}", "dashboard", str(save), "--port", str(port))
    client = DashboardClient(port, 0.0)
    child.until("is at http:")
    return Worker(child, _answered([client.page, client.state], ANSWERS["dashboard"])), client


def _training(folders: Folders, save: Path, age: str) -> Worker:
    child = folders.child(f"pretrain, {age}", *folders.training(save))
    child.until("lm loss")
    return Worker(child, _trained(save / "metrics.jsonl"))


def _copied(save: Path, to: Path) -> Path:
    """Copy the newest checkpoint; another is written meanwhile, and older ones go."""
    for _ in range(20):
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        newest = int((save / checkpoint_files.TRACKER).read_text())
        with contextlib.suppress(OSError, shutil.Error):
            name = f"iter_{newest:07d}"
            shutil.copytree(save / name, to / name)
            (to / checkpoint_files.TRACKER).write_text(str(newest))
            return to
    raise SystemExit(f"{save}: no checkpoint that stays for a second")


def in_turns(workers: list[Worker], rounds: int, rng: random.Random) -> None:
    """Let each take a turn in each round, in an order that is drawn; the first round does not count."""
    for number in range(rounds + 1):
        for worker in rng.sample(workers, len(workers)):
            worker.take()
        if not number:
            for worker in workers:
                worker.spent.clear()


def compared(workers: list[Worker]) -> dict[str, Any]:
    """Return how the old one compares with the new ones, and these with each other: medians of rounds."""
    result: dict[str, Any] = {"rounds": len(workers[0].spent)}
    for which, name in enumerate(("processor", "clock")):
        old, new, other = ([spent[which] for spent in worker.spent] for worker in workers)
        ratios = [
            first / ((second + third) / 2) for first, second, third in zip(old, new, other, strict=True)
        ]
        among = [third / second for second, third in zip(new, other, strict=True)]
        result[name] = {
            "milliseconds": dict(zip(AGES, map(statistics.median, (old, new, other)), strict=True)),
            "old_of_new": statistics.median(ratios),
            "old_of_new_quartiles": statistics.quantiles(ratios, n=4)[::2],
            "new_of_new": statistics.median(among),
            "turns": {age: worker.spent for age, worker in zip(AGES, workers, strict=True)}
            if which == 0
            else None,
        }
    return result


class Ageing:
    """The three old processes with their clients, and what is compared with them.

    Args:
        folders: where all is.
        ending: is set when clients are to stop.
    """

    def __init__(self, folders: Folders) -> None:
        self.folders, self.save = folders, folders.folder / "save"
        self.children: list[Worker] = []
        self._ending = threading.Event()
        self.asked = 0

    def grow_old(self, seconds: float) -> None:
        """Let a training, a server and a page work for so long."""
        self.training = self._kept(_training(self.folders, self.save, "old"))
        self.server, served = self._with_client(_server(self.folders, "old"))
        self.page, shown = self._with_client(_page(self.folders, self.save, "old"))
        threads = [threading.Thread(target=self._ask, args=(client,)) for client in (served, shown)]
        for thread in threads:
            thread.start()
        try:
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                time.sleep(1)
                for worker in self.children:
                    if worker.child.process.poll() is not None:
                        raise SystemExit(f"{worker.child.name} has ended: {worker.child.told()[-2000:]}")
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()
        self.iterations = _iteration(self.save / "metrics.jsonl")

    def _kept(self, worker: Worker) -> Worker:
        self.children.append(worker)
        return worker

    def _with_client(self, made: tuple[Worker, Any]) -> tuple[Worker, Any]:
        return self._kept(made[0]), made[1]

    def _ask(self, client: ServeClient | DashboardClient) -> None:
        while not self._ending.wait(client.pause()):
            kind, fault = client.ask()
            self.asked += 1
            if fault:
                print(f"{kind}: {fault}", flush=True)

    def compare(self, rounds: int, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
        """Compare each with two new ones."""
        for name, old, make in (
            ("serve", self.server, lambda age: _server(self.folders, age)[0]),
            ("dashboard", self.page, lambda age: _page(self.folders, self.save, age)[0]),
            ("pretrain", self.training, self._new_training),
        ):
            workers = [old]
            for age in AGES[1:]:
                workers.append(self._kept(make(age)))
                if name == "pretrain":
                    workers[-1].signal(signal.SIGSTOP)
            if name == "pretrain":
                old.signal(signal.SIGSTOP)
            in_turns(workers, rounds * MORE[name], rng)
            minutes = (time.monotonic() - old.child.begun) / 60
            yield name, {"age_minutes": minutes, **compared(workers)}

    def _new_training(self, age: str) -> Worker:
        copy = _copied(self.save, self.folders.folder / age.replace(" ", "-"))
        return _training(self.folders, copy, age)

    def end(self) -> None:
        """End all."""
        for worker in self.children:
            if worker.child.process.poll() is None:
                worker.signal(signal.SIGCONT)
                worker.child.end(signal.SIGTERM)


def _commit() -> str:
    words = ["git", "-C", str(tiny.ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout.strip()


def main() -> int:
    """Print the table; return how many are slower than a new one by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="until they are compared")
    parser.add_argument(
        "--rounds", type=int, default=16, help="turns of each training; servers take thrice as many"
    )
    parser.add_argument("--seed", type=int, default=1, help="decides the order in each round")
    parser.add_argument("--json", type=Path, help="write the turns there")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    content: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": _commit(), "rows": {}}
    with tempfile.TemporaryDirectory(prefix="ageing-") as folder:
        ageing = Ageing(Folders(Path(folder)))
        try:
            ageing.grow_old(60 * given.minutes)
            content |= {"iterations": ageing.iterations, "requests": ageing.asked}
            for name, row in ageing.compare(given.rounds, random.Random(given.seed)):
                content["rows"][name] = row
                _tell(name, row)
                if given.json:
                    given.json.write_text(json.dumps(content, indent=1) + "\n")
        finally:
            ageing.end()
    return sum(row["processor"]["old_of_new"] > 1 + WITHIN for row in content["rows"].values())


def _tell(name: str, row: dict[str, Any]) -> None:
    for which in ("processor", "clock"):
        found = row[which]
        low, high = found["old_of_new_quartiles"]
        print(
            f"{name}, {row['age_minutes']:.0f} min, {which}: "
            f"{', '.join(f'{age} {ms:.2f} ms' for age, ms in found['milliseconds'].items())}; "
            f"old of new {found['old_of_new']:.3f} ({low:.3f} to {high:.3f}), "
            f"new of new {found['new_of_new']:.3f}, {row['rounds']} rounds",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
