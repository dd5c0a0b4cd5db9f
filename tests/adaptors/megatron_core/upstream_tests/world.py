"""A world: the ranks that run one file of upstream's tests together, and the watch over them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megatron_npu.process import extension_locks

from . import worlds
from .ports import free_port
from .results import COLLECTION, EXCLUDED, FAILED, FileResult, Result, merge

COLLECTING = 120.0  # seconds until every rank knows its tests
ENDING = 20.0  # seconds for the end of a session: upstream's last fixture is a barrier
_SPARE = 0.1  # part of the machine's memory that the ranks of a test must leave
MAX_STALLS = 3  # a file in which so many tests hang is given up
# After such a failure the ranks no longer agree on what comes next.
_BROKEN = re.compile(r"gloo|HCCL|hccl|NCCL|Connection|[Tt]ime(d )?out|Broken pipe|Socket|store", re.ASCII)


def _all_start(file: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Setting:
    """What all worlds of a run have in common."""

    checkout: Path
    scratch: Path
    limit: float  # seconds for one test
    arguments: tuple[str, ...] = ()  # for pytest
    fork: bool = True
    barred: Callable[[str], Mapping[str, str]] = _all_start  # tests of a file not to start: why
    threads: int = 12000  # of all ranks: eight with 25 groups of gloo have 600, a test of 0.18.2 over 4,000
    grace: float = 8.0  # seconds of silence after a failure in some ranks: the others do not end this test


@dataclass
class _Rank:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    names: list[str] | None = None
    barred: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    failing: bool = False  # in the teardown of a test that failed
    waiting: bool = False
    ended: bool = False
    unreadable: Result | None = None


class World:
    """``size`` processes that run the tests ``selected`` (None: all) of one file."""

    def __init__(self, setting: Setting, file: str, size: int, selected: list[str] | None) -> None:
        self.setting, self.file, self.size = setting, file, size
        self.order: dict[str, list[Result]] = {}  # as they came, over all ranks
        self.early: dict[str, Result] = {}  # the first failure of a test, told before its teardown
        self.broken = ""  # why the ranks cannot go on
        port = free_port()
        context = multiprocessing.get_context("fork" if setting.fork else "spawn")
        self.ranks = [self._start(context, index, port, selected) for index in range(size)]

    def _start(self, context, index: int, port: int, selected: list[str] | None) -> _Rank:
        here, there = context.Pipe()
        name = f"{self.file.replace('/', '.')}.rank{index}"
        folder = self.setting.scratch / "tmp" / name
        log = self.setting.scratch / "logs" / f"{name}.log"
        arguments = [self.file, f"--basetemp={folder}", *self.setting.arguments]
        variables = _variables(index, self.size, port) | worlds.environment_for(self.file)
        process = context.Process(
            target=_enter,
            args=(there, variables, str(self.setting.scratch / "cwd"), arguments),
            kwargs={"selected": selected, "barred": self.setting.barred(self.file), "log": log},
        )
        process.start()
        there.close()
        return _Rank(process, here)

    def run(self) -> tuple[dict[str, Result], list[str]]:
        """Return what the tests did, and the names of those that this world did not come to."""
        try:
            stalled = self._watch()
        finally:
            self._kill()
        return self._conclude(stalled)

    # -- the watch -------------------------------------------------------------------------------

    def _watch(self) -> bool:
        """Take messages until all ranks ended, this world is broken, or nothing came in time.

        Return whether it was for want of time.
        """
        last = time.monotonic()
        while not all(rank.ended for rank in self.ranks):
            open_ = {rank.connection: rank for rank in self.ranks if not rank.ended}
            ready = wait(list(open_), timeout=1.0)
            now = time.monotonic()
            for connection in ready:
                self._take(open_[connection])
            if ready:
                last = now
            if (self.broken or any(rank.failing for rank in self.ranks)) and now - last > self.setting.grace:
                return False
            if self._settle():
                return False
            if _memory_is_short():
                self.broken = "does not fit in the memory of the machine"
                return False
            if self._threads() > self.setting.threads:
                self.broken = f"has more than {self.setting.threads} threads"
                return False
            if now - last > self._patience():
                self._show_stacks()
                return True
        return False

    def _threads(self) -> int:
        """Return the number of threads of all ranks."""
        count = 0
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # it has just ended
                status = Path(f"/proc/{rank.process.pid}/status").read_text()
                count += int(re.search(r"^Threads:\s+(\d+)$", status, re.MULTILINE)[1])
        return count

    def _show_stacks(self) -> None:
        """Let every rank write to its log where it is."""
        for rank in self.ranks:
            if rank.process.is_alive():
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def _patience(self) -> float:
        """Return the seconds that may pass without a message."""
        if any(rank.ended for rank in self.ranks):
            return ENDING
        collected = all(rank.names is not None for rank in self.ranks)
        return self.setting.limit if collected else max(COLLECTING, self.setting.limit)

    def _take(self, rank: _Rank) -> None:
        try:
            message = json.loads(rank.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            rank.ended = True
            self.broken = self.broken or f"rank {self.ranks.index(rank)} ended"
            return
        event = message["event"]
        if event == "collected":
            rank.names, rank.barred = message["names"], message["barred"]
        elif event == "unreadable":
            rank.unreadable = Result(message["outcome"], message["text"])
        elif event == "end":
            rank.ended = True
        elif event == "failing":
            rank.failing = True
            self.early.setdefault(message["name"], Result(FAILED, message["text"]))
        elif event == "test":
            rank.failing = False
            result = Result(message["outcome"], message["text"], message["seconds"])
            rank.results[message["name"]] = result
            self.order.setdefault(message["name"], []).append(result)
            rank.waiting = result.outcome == FAILED
            if rank.waiting and _BROKEN.search(result.text):
                self.broken = self.broken or result.text

    def _settle(self) -> bool:
        """Let ranks go on that failed all alike; return whether this world must be replaced."""
        waiting = [rank for rank in self.ranks if rank.waiting]
        if not waiting:
            return False
        name = next(reversed(waiting[0].results))
        if not all(name in rank.results for rank in self.ranks if not rank.ended):
            self.broken = self.broken or f"{name} failed in some ranks only"
            return False
        if self.broken or len(waiting) < self.size:
            return True
        for rank in waiting:
            rank.waiting = False
            rank.connection.send_bytes(b"go on")
        return False

    def _kill(self) -> None:
        for rank in self.ranks:
            try:
                os.killpg(rank.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                rank.process.kill()
            rank.process.join()
            rank.connection.close()
        extension_locks.remove_stale("upstream's tests")  # 0.19 compiles one where it recomputes

    # -- the end ---------------------------------------------------------------------------------

    def _conclude(self, stalled: bool) -> tuple[dict[str, Result], list[str]]:
        unreadable = next((rank.unreadable for rank in self.ranks if rank.unreadable), None)
        if unreadable is not None:
            return {COLLECTION: unreadable}, []
        names = next((rank.names for rank in self.ranks if rank.names is not None), None)
        if names is None:
            return {COLLECTION: Result(FAILED, self.broken or "no end of the collection")}, []
        results = {name: Result(EXCLUDED, why) for name, why in self.ranks[0].barred.items()}
        for position, name in enumerate(names):
            came = self.order.get(name, [])
            failed = any(result.outcome == FAILED for result in came)
            if len(came) == self.size and not failed:
                results[name] = merge(came)
                continue
            if came and len(came) == self.size and all(result.outcome == FAILED for result in came):
                results[name] = merge(came)
                if not self.broken:
                    continue
            # The first test that went wrong: what came after it in other ranks does not count.
            silent = self.early.get(name) or Result(FAILED, self._silence(stalled))
            results[name] = merge(came) if failed else silent
            return results, names[position + 1 :]
        return results, []

    def _silence(self, stalled: bool) -> str:
        if stalled:
            return f"no end after {self.setting.limit:.0f} s"
        return f"did not end in every rank: {self.broken}"


def run_file(setting: Setting, file: str, size: int, selected: list[str] | None = None) -> FileResult:
    """Run a file in worlds of ``size`` ranks, a new one wherever one breaks, until each test has a result."""
    began = time.monotonic()
    answer = FileResult(file, size)
    stalls, left = 0, selected
    while left is None or left:
        results, left = World(setting, file, size, left).run()
        answer.tests |= results
        stalls += any(result.text.startswith("no end after") for result in results.values())
        if stalls >= MAX_STALLS:
            answer.tests |= {name: Result(FAILED, "not run: its file hangs") for name in left}
            break
    answer.seconds = round(time.monotonic() - began, 1)
    return answer


def run_alone(setting: Setting, files: Mapping[str, list[str] | None], jobs: int) -> Iterator[FileResult]:
    """Run files in one rank each, of each the named tests (None: all), ``jobs`` files at a time."""
    context = multiprocessing.get_context("fork" if setting.fork else "spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        running = [pool.submit(run_file, setting, file, 1, names) for file, names in files.items()]
        try:
            for one in as_completed(running):
                yield one.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # what has not begun, where the run is ended


def _enter(connection, variables, directory, arguments, selected, barred, log) -> None:
    os.environ.update(variables)
    os.chdir(directory)
    from . import rank  # imports torch and Megatron: only once the plug-in is armed

    rank.main(connection, arguments, selected, barred, log)


def _memory_is_short() -> bool:
    """Return whether the machine is about to have no memory: the kernel ends a process of its choice then."""
    total, available = (
        int(re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)[1])
        for name in ("MemTotal", "MemAvailable")
    )
    return available < _SPARE * total


def _variables(index: int, size: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives a rank of a machine with ``size`` processes."""
    return {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(index),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
