"""Run the watchdog thread of one rank, which exchanges heartbeats and reports failures."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from megatron_npu.process import stacks
from megatron_npu.watchdog import place, verdicts
from megatron_npu.watchdog.board import KNOWS, Board, Process, Word
from megatron_npu.watchdog.deaths import Deaths
from megatron_npu.watchdog.stillness import Stillness
from megatron_npu.watchdog.store_guard import StoreGuard

_PERIOD = 1.0  # seconds between two words
_LATER = 0.1  # seconds between two looks at who knows the verdict
_TOGETHER = 0.02  # seconds in which a whole run that is being ended goes: then there is nothing to tell
_QUIET = 5.0  # seconds of silence after which a rank asks once how its neighbour ended
_LOOK = 2.5  # periods after which a rank that says nothing new is gone, where another has failed
_PATIENCE = 5.0  # seconds for the main thread to end by itself after the verdict
_HEARING = 20.0  # seconds at most for which rank 0 waits until all others know the verdict
_CAUSES = 8  # of an error, that are looked at
_EXIT = 1


class _StoreEndedError(Exception):
    """Raised when the process that served the store has ended."""


class Rank:
    """The watchdog of one rank, which runs in a thread.

    Args:
        board: the records of the run.
        rank, ranks: the number of the rank, and the number of ranks.
        limit: the maximum number of seconds without a heartbeat or progress.
        step_now: see ``begin``.
    """

    def __init__(
        self, board: Board, rank: int, ranks: int, limit: float, step_now: Callable[[], int]
    ) -> None:
        self._board, self._rank, self._ranks, self._limit = board, rank, ranks, limit
        self._thread = threading.Thread(target=self._run, name="megatron_npu watchdog", daemon=True)
        self._owner = os.getpid()
        self._processes: list[Process] = []
        self._deaths = Deaths()
        self._stillness = Stillness(limit, step_now)
        self._stopping, self._failing = threading.Event(), threading.Event()
        self._looked, self._told, self._heard_by_all = (threading.Event() for _ in range(3))
        self._blamed = self._has_own_error = self._alone = False
        self._former = sys.excepthook
        self._news = 0
        self._neighbour, self._heard, self._has_asked = rank, (-1, 0.0), False
        self._guard = StoreGuard(limit, self._say_cut)
        self._has_entered = False

    def start(self) -> None:
        """Start the watchdog thread."""
        sys.excepthook = self._hook
        atexit.register(self.stop)
        if stacks.print_on_signal():
            self._deaths.listen()
        self._thread.start()
        self._guard.start()

    def stop(self) -> None:
        """Stop the watchdog thread, and record a normal end unless an error is recorded."""
        if os.getpid() != self._owner:  # a forked child, which has no such thread
            return
        atexit.unregister(self.stop)
        if sys.excepthook == self._hook:
            sys.excepthook = self._former
        self._deaths.ignore()
        if self._told.is_set():
            _limit_exit()
        self._stopping.set()
        self._deaths.wake()
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():  # else it waits for the store
            self._guard.stop()

    # -- what the main thread does

    def failed(self, error: BaseException) -> bool:
        """Return True if another rank caused an error; see ``process_watch.failed``."""
        if self._blamed:
            return self._told.is_set()
        self._blamed = True
        if _is_of_a_collective(error):
            self._failing.set()
            self._deaths.wake()
            self._looked.wait(_LOOK * _PERIOD + _PATIENCE)
        if self._told.is_set():
            self._heard_by_all.wait(_HEARING)
        if not self._told.is_set():
            self._has_own_error = True
            lines = str(error).strip().splitlines()
            with contextlib.suppress(Exception):
                self._board.leave(self._rank, f"{type(error).__name__}: {lines[0] if lines else ''}"[:300])
        return self._told.is_set()

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the process with an error, which is printed unless another rank is reported as the cause."""
        if os.getpid() == self._owner:
            self.failed(error)
            if self._told.is_set() and (isinstance(error, RuntimeError) or _is_of_a_collective(error)):
                return
        self._former(kind, error, trace)

    # -- what the thread does

    def _run(self) -> None:
        try:
            self._board.open()
            while not self._stopping.is_set() and not self._told.is_set():
                self._look()
            if self._stopping.is_set() and not self._has_own_error:
                self._board.leave(self._rank, "")
        except Exception as error:  # of the store: it is gone, with the rank or the launcher that held it
            self._store_is_gone(error)

    def _look(self) -> None:
        """Send a heartbeat, wait, and check the other ranks."""
        self._beat()
        if not self._processes:
            self._meet()
        self._hear_of_ends(_PERIOD)
        if self._failing.is_set():  # connections are closed before the kernel tells of an end
            self._hear_of_ends(_PERIOD / 4)
        if self._stopping.is_set():
            return
        if self._has_own_error:  # which is told by the main thread: all ranks may have the same
            return
        self._hear_signals()
        news, word = self._board.look(self._neighbour)
        self._guard.answered()
        if news != self._news:
            self._news = news
            self._read_news()
        elif self._failing.is_set():
            self._find_silent()
        else:
            self._listen(word)
            self._see_whether_anybody_moves()

    def _hear_signals(self) -> None:
        """Ask all other ranks to print their stacks after a SIGUSR1, as this rank has already done."""
        if signal.SIGUSR1 in self._deaths.signals:
            self._board.ask_for_stacks(self._rank)
        self._deaths.signals.clear()

    def _read_news(self) -> None:
        if verdict := self._board.verdict():
            return self._tell(verdict)
        asked = self._board.asking()
        if asked != self._rank:
            print(
                f"megatron_npu: stacks of rank {self._rank}, requested by a signal to rank {asked}:",
                file=sys.stderr,
                flush=True,
            )
            stacks.print_now()

    def _beat(self) -> None:
        self._board.beat(self._rank, self._stillness.look())

    def _meet(self) -> None:
        """Find the processes of the other ranks, once all ranks are registered."""
        own = Process.own(self._rank)
        if not self._has_entered:
            self._board.enter(own)
            self._has_entered = True
        self._processes = self._board.processes(self._ranks) or []
        if not self._processes:
            return
        others = [each for each in self._processes if each.rank != self._rank]
        self._deaths.watch(each for each in others if each.space and each.space == own.space)
        if self._stopping.is_set() or self._failing.is_set():
            self._deaths.wake()
        self._next_neighbour()

    def _hear_of_ends(self, seconds: float) -> None:
        """Wait, and handle the processes of this machine that have ended.

        Raises:
            _StoreEndedError: the store ended with one of them. A request to the store would print a page of
                C++ messages.
        """
        for process in self._deaths.wait(seconds):
            if process.rank == 0 and _rank_0_holds_store():
                raise _StoreEndedError
            self._ended(process)

    def _ended(self, process: Process) -> None:
        """Report why a process has ended."""
        error = self._board.left(process.rank)
        if error == "" or self._has_own_error:
            return
        time.sleep(_TOGETHER)
        (beat,) = self._board.beats([process.rank])
        self._judge(verdicts.of_end(process, error, beat))

    def _find_silent(self) -> None:
        """Report ranks that have failed or have stopped sending heartbeats, after a collective has failed."""
        others = self._others_without_end()
        if self._told.is_set():
            return
        before = self._last_words(others)
        self._wait_and_beat(_LOOK * _PERIOD)
        if self._told.is_set():
            return
        silent = verdicts.silent(others, before, self._last_words(others))
        gone = self._living([process for process, _ in silent])
        if gone:
            beats = self._board.beats([each.rank for each in gone])
            self._judge(verdicts.of_silent(list(zip(gone, beats, strict=True))))
        self._failing.clear()
        self._looked.set()

    def _others_without_end(self) -> list[Process]:
        """Return the other ranks that are still running, and report those that ended with an error."""
        others = [each for each in self._processes if each.rank != self._rank]
        ends = self._board.ends([each.rank for each in others]) if others else []
        for process, error in zip(others, ends, strict=True):
            if error:
                self._ended(process)
        return [process for process, error in zip(others, ends, strict=True) if error is None]

    def _living(self, processes: list[Process]) -> list[Process]:
        """Return the ranks that have not yet reported that they have ended."""
        ends = self._board.ends([each.rank for each in processes]) if processes else []
        return [process for process, error in zip(processes, ends, strict=True) if error is None]

    def _last_words(self, processes: list[Process]) -> list[Word]:
        return self._board.words([each.rank for each in processes]) if processes else []

    def _wait_and_beat(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and not self._stopping.is_set() and not self._told.is_set():
            self._beat()
            # the connections of one that ends are closed before the kernel tells of its end
            self._hear_of_ends(min(_PERIOD, end - now))

    def _next_neighbour(self) -> None:
        """Watch the heartbeat of the next running rank."""
        order = [(self._neighbour + distance) % self._ranks for distance in range(1, self._ranks)]
        order = [rank for rank in order if rank != self._rank]
        living = [rank for rank, error in zip(order, self._board.ends(order), strict=True) if error is None]
        if living:
            self._neighbour, self._heard = living[0], (-1, time.monotonic())

    def _listen(self, word: Word) -> None:
        """Check that the heartbeat of the next rank still advances; ``word`` is the latest heartbeat."""
        if not self._processes or self._neighbour == self._rank:
            return
        if word.number != self._heard[0]:
            self._heard, self._has_asked = (word.number, time.monotonic()), False
            return
        silence, neighbour = time.monotonic() - self._heard[1], self._processes[self._neighbour]
        if silence > min(_QUIET, self._limit) and not self._has_asked:
            self._has_asked = True
            if self._board.left(neighbour.rank):  # with an error: those that connect to it would wait in vain
                return self._ended(neighbour)
        if silence > self._limit:
            if self._board.left(neighbour.rank) is not None:
                return self._next_neighbour()
            (beat,) = self._board.beats([neighbour.rank])
            self._judge(verdicts.of_neighbour(neighbour, beat, silence))

    def _see_whether_anybody_moves(self) -> None:
        """Report the ranks for which the others are waiting, if no rank has made progress for too long."""
        if self._stillness.still < self._limit or not self._processes:
            return
        living = self._living(self._processes)
        moved = max(self._limit - 2 * _PERIOD, self._limit / 2)  # since then: words are as old as that
        if any(word.waits or word.still < moved for word in self._last_words(living)):
            return
        # where each stands is asked by one rank alone, unless that one does not get to it
        if self._rank != living[0].rank and self._stillness.still < self._limit + _PATIENCE:
            return
        late = verdicts.late(living, self._board.beats([each.rank for each in living]), moved)
        if late:
            self._judge(verdicts.of_late(late, self._limit))

    def _judge(self, verdict: str) -> None:
        if not self._stopping.is_set():
            self._tell(self._board.judge(verdict))

    def _tell(self, verdict: str) -> None:
        """Print the verdict, and end this process if its main thread does not end it first."""
        print(f"megatron_npu: rank {self._rank} exits: {verdict}", file=sys.stderr, flush=True)
        if "\n" in verdict:  # a hang, and where each rank stands is of interest
            stacks.print_now()
        self._told.set()
        self._looked.set()
        if not self._alone:
            with contextlib.suppress(Exception):  # of a store that goes just now
                self._board.told(self._rank)
                if self._rank == 0:  # it may hold the store, in which the others read what has happened
                    self._wait_for_hearers()
        self._guard.stop()
        self._heard_by_all.set()
        if not self._stopping.wait(_PATIENCE):
            os._exit(_EXIT)

    def _wait_for_hearers(self) -> None:
        """Wait until all ranks know the verdict, except for ranks that have ended or whose heartbeat has
        stopped.
        """
        began, own = time.monotonic(), Process.own(self._rank)
        first = self._last_words(self._processes)
        while (waited := time.monotonic() - began) < _HEARING:
            words = zip(self._processes, first, self._last_words(self._processes), strict=True)
            if not any(
                word.number != KNOWS
                and each.listens(own)
                and not (waited > _LOOK * _PERIOD and word.number == before.number)
                for each, before, word in words
            ):
                return
            self._guard.answered()
            time.sleep(_LATER)

    def _say_cut(self, seconds: float) -> str:
        """Return the message about a store that does not answer."""
        first = self._processes[0] if self._processes and self._rank else None
        return verdicts.of_cut(self._rank, first, self._board.where, seconds)

    def _store_is_gone(self, error: Exception) -> None:
        """Handle the loss of the store, which may mean that the machine that served it is lost."""
        self._alone = True
        self._guard.stop()
        first = next(iter(self._processes), None)
        if first is None or not _is_of_a_launcher_elsewhere(first):
            self._without_store(first, error)
        elif not self._stopping.wait(_PERIOD / 4) and not self._has_own_error:
            self._tell(verdicts.of_store(first, has_ended=False, error=error))

    def _without_store(self, first: Process | None, error: Exception) -> None:
        """End the process if it waits too long for the process that served the store."""
        gone = isinstance(error, _StoreEndedError)
        stands, since = place.of_main_thread(), time.monotonic()
        while not self._stopping.is_set():
            gone = self._first_ends(_PERIOD) or gone
            now = place.of_main_thread()
            if now.mark != stands.mark or not now.collective:
                stands, since = now, time.monotonic()
            if self._has_own_error or not (self._failing.is_set() or time.monotonic() - since > _PATIENCE):
                continue
            gone = gone or self._first_ends(_PERIOD / 4)  # as in ``_look``
            return self._tell(verdicts.of_store(first, has_ended=gone, error=error))

    def _first_ends(self, seconds: float) -> bool:
        """Return True if rank 0, which serves the store, ends before the timeout or a wake-up."""
        return any(process.rank == 0 for process in self._deaths.wait(seconds)) and _rank_0_holds_store()


def _limit_exit() -> None:
    """Make SIGALRM end this process after ``_PATIENCE`` seconds, because its exit may hang.

    The interpreter's shutdown waits for unfinished operations with ranks that are lost, without ever running
    Python's threads again.
    """
    if hasattr(signal, "setitimer"):  # Windows has none
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE)


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, means that a collective lost a rank.

    0.16.1 converts every error during dataset construction to a plain ``Exception``.
    """
    for _ in range(_CAUSES):  # an error may be its own cause
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ if error else None
    return False


def _is_of_a_launcher_elsewhere(first: Process) -> bool:
    """Return True if an agent on another machine serves the store, which then outlives the ranks."""
    own = Process.own(-1)
    return not _rank_0_holds_store() and (first.host, first.space) != (own.host, own.space)


def _rank_0_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun's agent: it outlives the ranks
