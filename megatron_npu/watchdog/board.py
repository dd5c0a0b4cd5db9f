"""Exchange records between ranks through the store of the run."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from megatron_npu.watchdog.phases import WAITING

_PATIENCE = timedelta(seconds=60)  # for an answer of the store
_TELLING = 10.0  # seconds from which on it is of interest for how long a rank has stood still


@dataclass(frozen=True)
class Process:
    """The operating-system process of a rank.

    Attributes:
        rank: the rank's number.
        host: the name of the rank's machine.
        pid: the process number on that machine.
        space: an identifier of the machine or container in which the process number is valid.
    """

    rank: int
    host: str
    pid: int
    space: str

    @staticmethod
    def own(rank: int) -> Process:
        """Return the record that describes the current process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:  # no Linux: nobody watches its neighbours by number
            space = ""
        return Process(rank, socket.gethostname(), os.getpid(), space)

    def listens(self, own: Process) -> bool:
        """Return True if this process is still able to react, as seen from the process ``own``.

        A process on another machine counts as reacting.
        """
        if not self.space or self.space != own.space:
            return True
        try:
            return psutil.Process(self.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a rank, including its position and its stack frames.

    Attributes:
        number: the number of the heartbeat, counted from 0.
        step: the current training step, counted from 1, or 0 if no step has started.
        still: the number of seconds since the main thread last made progress.
        phase, collective, place: see ``place.Place``; ``place`` is stored as a string.
        frames: the stack frames of the main thread, innermost first.
        file: the file that a stalled save is writing, with its size; empty if unknown.
    """

    number: int
    step: int
    still: float
    phase: str
    collective: str
    place: str
    frames: tuple[str, ...]
    file: str

    def __str__(self) -> str:
        long = f", for {self.still:.0f} s" if self.still >= _TELLING else ""
        file = f", and makes no progress with {self.file}" if self.file else ""
        return f"{self.place} (step {self.step}){long}{file}"

    def stack(self) -> str:
        """Return the stack frames of the rank, each on its own line."""
        return "".join(f"\n  {frame}" for frame in self.frames)


@dataclass(frozen=True)
class Word:
    """The short form of a rank's heartbeat, which is read each time.

    Attributes:
        number, still: see ``Beat``.
        waits: whether the rank waits for something outside the run.
    """

    number: int
    still: float
    waits: bool

    def __str__(self) -> str:
        return f"{self.number} {self.still:.1f} {self.waits:d}"

    @staticmethod
    def of(text: bytes) -> Word:
        """Parse a short heartbeat from the string that ``str`` returned for it."""
        number, still, waits = text.split()
        return Word(int(number), float(still), waits == b"1")


KNOWS = -1  # the number of the last word of a rank that knows the verdict
_LIVES = b"-"  # what stands in place of the end of a rank that has not ended


class Board:
    """The records of all ranks of a process group.

    Each rank has a separate connection for them.

    Each method sends one request to the store, for any number of ranks, except ``left``.

    Args:
        store: a connection to the store of the run that nothing else uses.
        name: distinguishes this group from earlier ones in the same store.
        where: the address of the store, for messages.
    """

    def __init__(self, store: dist.Store, name: str, where: str = "") -> None:
        self._store = dist.PrefixStore(f"megatron_npu/watchdog/{name}", store)
        self.where = where

    def enter(self, process: Process) -> None:
        """Register a rank, which is done once per rank.

        The rank must have sent a heartbeat before.
        """
        self._store.set(f"who/{process.rank}", json.dumps(asdict(process)))
        self._store.compare_set(f"end/{process.rank}", "", _LIVES.decode())
        self._store.add("entered", 1)

    def processes(self, ranks: int) -> list[Process] | None:
        """Return the processes of all ranks, or None until every rank is registered."""
        if int(self._store.add("entered", 0)) < ranks:
            return None
        texts = self._store.multi_get([f"who/{rank}" for rank in range(ranks)])
        return [Process(**json.loads(text)) for text in texts]

    def beat(self, rank: int, beat: Beat) -> None:
        """Write the heartbeat of a rank to the store, without reading from the store."""
        word = Word(beat.number, beat.still, beat.phase == WAITING)
        self._store.multi_set(  # type: ignore[attr-defined]
            [f"beat/{rank}", f"word/{rank}"], [json.dumps(asdict(beat)), str(word)]
        )

    def look(self, rank: int) -> tuple[int, Word]:
        """Return the numbers of verdicts and of requests so far, and the latest short heartbeat of a rank."""
        news, word = self._store.multi_get(["news", f"word/{rank}"])
        return int(news), Word.of(word)

    def words(self, ranks: list[int]) -> list[Word]:
        """Return the latest short heartbeats of the given registered ranks."""
        return [Word.of(text) for text in self._store.multi_get([f"word/{rank}" for rank in ranks])]

    def beats(self, ranks: list[int]) -> list[Beat]:
        """Return the latest full heartbeats of the given ranks.

        A rank writes them even before it registers.
        """
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        return [Beat(**_listed(json.loads(text))) for text in texts]

    def leave(self, rank: int, error: str) -> None:
        """Record that a rank has ended, and its error if it has one. An empty error means a normal end."""
        self._store.set(f"end/{rank}", f"{error}.")  # the point: a value may not be empty

    def left(self, rank: int) -> str | None:
        """Return how a rank ended, or None if the rank is still running or has never registered."""
        name = f"end/{rank}"
        return _end_of(self._store.get(name)) if self._store.check([name]) else None

    def ends(self, ranks: list[int]) -> list[str | None]:
        """Return how each registered rank ended, or None for ranks that are still running."""
        return [_end_of(text) for text in self._store.multi_get([f"end/{rank}" for rank in ranks])]

    def judge(self, verdict: str) -> str:
        """Record the verdict on the run, which states why the run failed.

        Return the first recorded verdict, which may be another rank's.
        """
        first = str(self._store.compare_set("verdict", "", verdict).decode())
        self._store.add("news", 1)
        return first

    def verdict(self) -> str | None:
        """Return the verdict on the run, or None if the run has no verdict yet."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def told(self, rank: int) -> None:
        """Record that a rank has read the verdict on the run."""
        self._store.set(f"word/{rank}", str(Word(KNOWS, 0.0, waits=False)))

    def ask_for_stacks(self, rank: int) -> None:
        """Make all ranks print their stacks after a rank has received SIGUSR1."""
        self._store.set("asked", str(rank))
        self._store.add("news", 1)

    def asking(self) -> int:
        """Return the rank that received the last request for stacks."""
        return int(self._store.get("asked"))

    def open(self) -> None:
        """Write the initial records of a rank to the store.

        Every rank must call this method first.
        """
        self._store.add("news", 0)


def _end_of(text: bytes) -> str | None:
    return None if text == _LIVES else text.decode()[:-1]


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "frames": tuple(values["frames"])}


def connect() -> dist.TCPStore | None:
    """Return a separate connection to the default process group's store, or None if no server provides
    this store.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
