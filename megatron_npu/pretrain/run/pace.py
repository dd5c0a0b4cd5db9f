"""Detect when the steps of a run become slower, and report possible causes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

SLOWER = 1.5  # than the run's own median
STEPS = 20  # so many in a row are no chance
REMEMBERED = 500  # stretches between two lines of the log


@dataclass(frozen=True)
class Load:
    """A snapshot of the load on the process and its machine.

    Attributes:
        threads: the number of threads of this process.
        switches: the number of its voluntary context switches so far.
        memory: its resident memory in bytes.
        machine: the machine's load average over the last minute.
    """

    threads: int
    switches: int
    memory: int
    machine: float

    @staticmethod
    def now() -> Load:
        """Take a snapshot of this process."""
        import psutil

        process = psutil.Process()
        return Load(
            process.num_threads(),
            process.num_ctx_switches().voluntary,
            process.memory_info().rss,
            psutil.getloadavg()[0],
        )


@dataclass(frozen=True)
class _Stretch:
    steps: int
    seconds: float  # of each step
    switches: float  # in each step
    load: Load


class Pace:
    """Detects slow steps by comparing the steps of a run with their median.

    A report is made each time they become slower.

    Args:
        look: returns a ``Load``.
    """

    def __init__(self, look: Callable[[], Load] = Load.now) -> None:
        self._look = look
        self._before = look()
        self._usual: deque[_Stretch] = deque(maxlen=REMEMBERED)
        self._slow: deque[_Stretch] = deque(maxlen=REMEMBERED)

    def note(self, seconds: float, steps: int) -> str | None:
        """Add a group of steps to the comparison.

        Return a log line if the steps have become slower, or None.

        Args:
            seconds: duration of the group.
            steps: number of steps, at least 1.
        """
        load = self._look()
        stretch = _Stretch(steps, seconds / steps, (load.switches - self._before.switches) / steps, load)
        self._before = load
        if not self._is_slow(stretch):
            self._usual.append(stretch)
            self._slow.clear()
            return None
        said = _steps(self._slow) >= STEPS
        self._slow.append(stretch)
        return None if said or _steps(self._slow) < STEPS else self._line()

    def _is_slow(self, stretch: _Stretch) -> bool:
        return _steps(self._usual) >= STEPS and stretch.seconds > SLOWER * _middle(self._usual).seconds

    def _line(self) -> str:
        usual, slow = _middle(self._usual), self._slow[-1]
        before, now = usual.load, slow.load
        return (
            f" steps have become {slow.seconds / usual.seconds:.1f} times as slow: "
            f"{usual.seconds * 1e3:.0f} ms -> {slow.seconds * 1e3:.0f} ms for {_steps(self._slow)} "
            f"steps; threads {before.threads} -> {now.threads}, context switches per step "
            f"{usual.switches:.0f} -> {slow.switches:.0f}, resident {before.memory / 2**30:.1f} -> "
            f"{now.memory / 2**30:.1f} GiB, machine load {before.machine:.1f} -> {now.machine:.1f} on "
            f"{os.cpu_count()} cores"
        )


def _steps(stretches: Collection[_Stretch]) -> int:
    return sum(stretch.steps for stretch in stretches)


def _middle(stretches: Collection[_Stretch]) -> _Stretch:
    """Return the entry with the median time; if there are two middle entries, return the upper one."""
    return sorted(stretches, key=lambda stretch: stretch.seconds)[len(stretches) // 2]
