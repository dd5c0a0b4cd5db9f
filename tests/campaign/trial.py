"""One trial: a run in a folder of its own, what can be done to it, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.campaign.ways import Way
from tests.support import tiny, warm

PATIENCE = 120.0  # seconds until what does not end counts as hung, on a machine with a core for each
SETTLING = 15.0  # seconds in which children may end behind their parents
SHARED = Path("/dev/shm")
_AGENT = "torch/distributed/elastic/multiprocessing/api.py:"  # torch's log of how a rank has ended


class FaultError(Exception):
    """A trial has not gone as it must: what kind of fault, and what exactly."""


class Trial:
    """A run that is harmed, and whose results are compared with those of one that is not.

    Args:
        way: what runs.
        folder: for its files; new.
        rng: decides what happens.
        calm: what the run makes if nobody harms it; None: this is that run.
        variables: of the environment, of all trials.
    """

    def __init__(
        self, way: Way, folder: Path, rng: random.Random, calm: object, variables: dict[str, str]
    ) -> None:
        self.way, self.folder, self.rng, self.calm = way, folder, rng, calm
        self._variables = variables
        self.place = folder / "cwd"  # by which its processes are found
        self.temporary = folder / "tmp"
        self.log, self.errors = folder / "log.txt", folder / "errors.txt"
        self.hits = self.kills = 0  # signals that have reached it
        self.early = 2.0  # seconds in which a harm of its beginning comes
        self.most = 6  # times that it is struck
        self._logged = 0  # iterations, before the start
        self.process: subprocess.Popen[bytes] | None = None
        for path in (self.place, self.temporary):
            path.mkdir(parents=True)

    # -- running

    def start(self, *more: str, restarts: int = 0, aside: str = "", **faults: str) -> subprocess.Popen[bytes]:
        """Start the run.

        Args:
            more: flags.
            aside: of a second one at a time, the names of its logs.
            faults: what ``faults.c`` reads.
        """
        if not aside:
            self._logged = self.way.progress(self.folder) if self.way.progress else 0
        command = self.way.command(self.folder, *more, restarts=restarts)
        env = tiny.environment() | self.way.more | self._variables | {"TMPDIR": str(self.temporary)}
        command, env = warm.ready(command, env, self.way.modules, self.way.tree)
        if faults:
            env |= {"FAULT_UNDER": str(self.folder / "save"), **faults}
        log, errors = (path.with_name(f"{aside}{path.name}") for path in (self.log, self.errors))
        with open(log, "ab") as out, open(errors, "ab") as err:
            process = subprocess.Popen(
                command, env=env, cwd=self.place, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        if not aside:
            self.process = process
        return process

    def end(self, process: subprocess.Popen[bytes] | None = None) -> int:
        """Wait until it has ended; return its exit code. Nothing of it may run any more then."""
        process = process or self.process
        assert process is not None
        code = self.wait(process)
        begun = time.monotonic()
        while left := self.processes():
            if _is_late(begun, SETTLING):
                names = [_described(each) for each in left]
                stacks = self._stacks()
                self.kill_all()
                raise FaultError("left behind", f"processes: {names}: {stacks}")
            time.sleep(0.02)
        return code

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until a run has ended; return its exit code."""
        begun = time.monotonic()
        while True:
            try:
                return process.wait(1)
            except subprocess.TimeoutExpired:
                if not _is_late(begun):
                    continue
            stacks = self._stacks()
            self.kill_all()
            raise FaultError("hung", f"{time.monotonic() - begun:.0f} s after the harm: {stacks}")

    def _stacks(self) -> str:
        """Return which processes there are, and what they print on SIGUSR1, which may end them."""
        there = [f"{each.pid} of {_parent(each)}" for each in self.processes()]
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGUSR1)
        time.sleep(2)
        return f"{there}: {self.told()[-5000:]}"

    def processes(self) -> list[psutil.Process]:
        """Return what runs in this trial's folder, but the client of the warm parent."""
        client = self.process.pid if self.process else 0
        return [each for each in _in_folder(self.place) if each.pid != client]

    def kill_all(self) -> None:
        """End everything."""
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.kill()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def launcher(self) -> psutil.Process | None:
        """Return the first process of the run: its agent, or the one that it is."""
        parents = warm.numbers()
        return next((each for each in self.processes() if _parent(each) in parents), None)

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks, as far as they are there."""
        first = self.launcher()
        if first is None or self.way.ranks == 1:
            return [first] if first else []
        with contextlib.suppress(psutil.Error):
            return sorted(first.children(), key=lambda each: each.pid)
        return []

    def send(self, number: int, process: psutil.Process) -> bool:
        """Send a signal; return whether the process was still there."""
        try:
            process.send_signal(number)
        except psutil.Error:
            return False
        self.hits += 1
        self.kills += number == signal.SIGKILL
        return True

    # -- waiting

    def until(self, happens: Callable[[], bool], pause: float = 0.004) -> bool:
        """Wait for something; return whether the run is still there then."""
        assert self.process is not None
        begun = time.monotonic()
        while self.process.poll() is None and not happens():
            if _is_late(begun):
                stacks = self._stacks()
                self.kill_all()
                raise FaultError("hung", f"nothing moves: {stacks}")
            time.sleep(pause)
        return self.process.poll() is None

    def iterations(self, number: int) -> Callable[[], bool]:
        """Return what says whether so many have been logged since the start."""
        progress = self.way.progress
        assert progress is not None
        return lambda: progress(self.folder) >= self._logged + number

    def is_saving(self) -> bool:
        """Return whether a checkpoint, or a result of another command, is being written."""
        save = self.folder / "save"
        names = os.listdir(save) if save.is_dir() else []
        if any(name.endswith(".partial") for name in names):
            return True
        if self.way.own:
            return False
        found = [int(name[5:]) for name in names if name.startswith("iter_")]
        return bool(found) and max(found) > self.way.newest(self.folder)

    # -- judging

    def told(self) -> str:
        """Return what it has printed."""
        return "".join(path.read_text(errors="replace") for path in (self.log, self.errors) if path.exists())

    def errors_told(self) -> list[str]:
        """Return the lines on its standard error, without warnings."""
        text = self.errors.read_text(errors="replace") if self.errors.exists() else ""
        return [line for line in text.splitlines() if line.strip() and "Warning" not in line]

    def check(self) -> None:
        """Look at what there is between two runs."""
        if found := self.way.faulty(self.folder):
            raise FaultError("lost", found)
        outcome = self.way.outcome(self.folder)
        if self.way.progress is None or self.calm is None:
            return
        assert isinstance(outcome, dict)
        assert isinstance(self.calm, dict)
        wrong = [number for number, loss in outcome.items() if loss != self.calm[number]]
        if wrong:
            number = wrong[0]
            raise FaultError("lost", f"loss {outcome[number]} at {number}, not {self.calm[number]}")

    def untraced(self) -> None:
        """See that no traceback was printed."""
        told = "".join(line for line in self.told().splitlines(True) if _AGENT not in line)
        at = told.find("Traceback (most recent call last)")
        if at >= 0:
            raise FaultError("traceback", told[at : at + 3000])

    def is_over(self) -> bool:
        """Return whether a tool, which would not do it twice, has made all that it must."""
        return self.way.progress is None and self.way.outcome(self.folder) == self.calm

    def finish(self) -> None:
        """Let it go on without harm; it must end as if there had never been any, and leave nothing."""
        self.check()
        if self.is_over():
            return self.judge()
        newest = self.way.newest(self.folder) if self.way.progress else 0
        before = self.log.stat().st_size
        self.start()
        if code := self.end():
            raise FaultError("lost", f"it does not go on: exit code {code}: {self.told()[-2000:]}")
        self.judge()
        said = self.log.read_bytes()[before:].decode(errors="replace")
        if newest and self.way.own and f"resuming from iteration {newest}" not in said:
            raise FaultError("lost", f"it did not go on from iteration {newest}")
        return None

    def judge(self) -> None:
        """See that a run that has ended well has made what it must, and has left nothing else."""
        self.check()
        outcome = self.way.outcome(self.folder)
        if self.calm is not None and not self.way.is_complete(outcome, self.calm):
            raise FaultError("lost", f"{outcome} is not {self.calm}")
        left = [path for path in (self.folder / "save").rglob("*") if path.name.endswith(".partial")]
        left += [path for path in self.temporary.iterdir() if not path.name.startswith("torchelastic_")]
        left += [path for path in SHARED.iterdir() if _is_ours(path)]
        if left:
            raise FaultError("left behind", f"files: {list(map(str, left))}")

    def remove(self) -> None:
        """End and remove everything."""
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.sweep()

    def sweep(self) -> None:
        """Remove what it has left in shared memory, which would be the next one's fault, too."""
        for path in filter(_is_ours, SHARED.iterdir()):
            path.unlink(missing_ok=True)


def _is_late(begun: float, seconds: float = PATIENCE) -> bool:
    """Return whether something takes too long, on a machine that may have much else to do."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return time.monotonic() - begun > seconds * max(1.0, busy)


def _described(process: psutil.Process) -> str:
    """Return what a process is, as far as it is there."""
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.name()} ({process.status()}): {' '.join(process.cmdline())[:80]}"
    return f"{process.pid}, gone"


def _is_ours(path: Path) -> bool:
    """Return whether shared memory is of trials: only in a namespace of their own is that known."""
    return "CAMPAIGN_NAMESPACE" in os.environ


def _in_folder(folder: Path) -> Iterator[psutil.Process]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{entry.name}/cwd") == str(folder):
                    process = psutil.Process(int(entry.name))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield process


def _parent(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.ppid()
    return 0
