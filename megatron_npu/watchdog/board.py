"""What ranks tell each other about themselves, in the store of the run."""

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
    """A rank as a process.

    Attributes:
        rank: its number in the run.
        host: the name of its machine.
        pid: its number there.
        space: what tells machines and containers apart, inside which process numbers mean the same.
    """

    rank: int
    host: str
    pid: int
    space: str

    @staticmethod
    def own(rank: int) -> Process:
        """Return this one."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:  # no Linux: nobody watches its neighbours by number
            space = ""
        return Process(rank, socket.gethostname(), os.getpid(), space)

    def listens(self, own: Process) -> bool:
        """Return whether it can hear of anything, as far as ``own`` can see: not elsewhere."""
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
    """A rank's word that it lives.

    Attributes:
        number: of the word, from 0 on.
        step: of training in which it is, counted from 1; 0: none has begun.
        still: seconds for which its main thread has not moved.
        phase, collective, place: as ``place.Place`` has them, the last one whole as text.
        frames: of its stack, the innermost first.
        file: of a save that stands still, the one that it writes, with its size; empty: none is known.
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
        file = f", and does not get on with {self.file}" if self.file else ""
        return f"{self.place} (step {self.step}){long}{file}"

    def stack(self) -> str:
        """Return its frames, each on a line of its own, with a line break before it."""
        return "".join(f"\n  {frame}" for frame in self.frames)


@dataclass(frozen=True)
class Word:
    """What is looked at of every rank's beat, in a few bytes.

    Attributes:
        number, still: as ``Beat`` has them.
        waits: whether it waits for what is outside of the run.
    """

    number: int
    still: float
    waits: bool

    def __str__(self) -> str:
        return f"{self.number} {self.still:.1f} {self.waits:d}"

    @staticmethod
    def of(text: bytes) -> Word:
        """Return what ``str`` has made a text of."""
        number, still, waits = text.split()
        return Word(int(number), float(still), waits == b"1")


KNOWS = -1  # the number of the last word of a rank that knows the verdict
_LIVES = b"-"  # what stands in place of the end of a rank that has not ended


class Board:
    """The notes of all ranks of one process group. Each rank has a connection of its own for them.

    A method asks the store one question, however many ranks it is about, but ``left``.

    Args:
        store: a connection to the store of the run, which nobody else uses.
        name: what tells this group from earlier ones in the same store.
        where: the address of the store, to be told.
    """

    def __init__(self, store: dist.Store, name: str, where: str = "") -> None:
        self._store = dist.PrefixStore(f"megatron_npu/watchdog/{name}", store)
        self.where = where

    def enter(self, process: Process) -> None:
        """Say who a rank is, once; it has beaten before."""
        self._store.set(f"who/{process.rank}", json.dumps(asdict(process)))
        self._store.compare_set(f"end/{process.rank}", "", _LIVES.decode())
        self._store.add("entered", 1)

    def processes(self, ranks: int) -> list[Process] | None:
        """Return all ranks; None as long as one has not entered."""
        if int(self._store.add("entered", 0)) < ranks:
            return None
        texts = self._store.multi_get([f"who/{rank}" for rank in range(ranks)])
        return [Process(**json.loads(text)) for text in texts]

    def beat(self, rank: int, beat: Beat) -> None:
        """Leave a rank's word; nothing is asked."""
        word = Word(beat.number, beat.still, beat.phase == WAITING)
        self._store.multi_set(  # type: ignore[attr-defined]
            [f"beat/{rank}", f"word/{rank}"], [json.dumps(asdict(beat)), str(word)]
        )

    def look(self, rank: int) -> tuple[int, Word]:
        """Return how many times anybody has judged or asked, and the last word of a rank that has beaten."""
        news, word = self._store.multi_get(["news", f"word/{rank}"])
        return int(news), Word.of(word)

    def words(self, ranks: list[int]) -> list[Word]:
        """Return the last words of ranks that have entered."""
        return [Word.of(text) for text in self._store.multi_get([f"word/{rank}" for rank in ranks])]

    def beats(self, ranks: list[int]) -> list[Beat]:
        """Return the last words of ranks; each has beaten before it has entered."""
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        return [Beat(**_listed(json.loads(text))) for text in texts]

    def leave(self, rank: int, error: str) -> None:
        """Say that a rank ends, by which error; empty: as it should."""
        self._store.set(f"end/{rank}", f"{error}.")  # the point: a value may not be empty

    def left(self, rank: int) -> str | None:
        """Return with what a rank has left; None: it has not, or not even entered."""
        name = f"end/{rank}"
        return _end_of(self._store.get(name)) if self._store.check([name]) else None

    def ends(self, ranks: list[int]) -> list[str | None]:
        """Return of ranks that have entered with what each has left; None: it has not."""
        return [_end_of(text) for text in self._store.multi_get([f"end/{rank}" for rank in ranks])]

    def judge(self, verdict: str) -> str:
        """Write what has happened to the run; return what the first one has written."""
        first = str(self._store.compare_set("verdict", "", verdict).decode())
        self._store.add("news", 1)
        return first

    def verdict(self) -> str | None:
        """Return what has happened to the run; None: nothing."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def told(self, rank: int) -> None:
        """Say that a rank knows the verdict."""
        self._store.set(f"word/{rank}", str(Word(KNOWS, 0.0, waits=False)))

    def ask_for_stacks(self, rank: int) -> None:
        """Have all ranks print where they stand, because a rank was asked to."""
        self._store.set("asked", str(rank))
        self._store.add("news", 1)

    def asking(self) -> int:
        """Return the rank that was asked last."""
        return int(self._store.get("asked"))

    def open(self) -> None:
        """Set there to something to look at: the first thing that each rank does."""
        self._store.add("news", 0)


def _end_of(text: bytes) -> str | None:
    return None if text == _LIVES else text.decode()[:-1]


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "frames": tuple(values["frames"])}


def connect() -> dist.TCPStore | None:
    """Return a connection of its own to the store of the default process group; None: it has no server."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
