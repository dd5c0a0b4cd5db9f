"""Detect whether other threads or child processes are working while the main thread makes no progress.

For example, the main thread may wait at one line of Python for a graph compiler, a kernel builder or a
checkpoint writer, without using CPU time itself. This does not count as a hang.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import psutil

_SHARE = 0.05  # of a core: more than what only waits needs for looking whether it still has to


@dataclass
class _Sample:
    at: float
    own: float
    children: dict[tuple[int, float], float]


@dataclass
class Elsewhere:
    """Detects work in other threads or child processes, from the CPU time used since the previous call.

    This method is called about once a second, and only while the main thread stands still, because searching
    for children costs milliseconds on a machine with many processes.
    """

    _last: _Sample | None = field(default=None)

    def forget(self) -> None:
        """Reset the measurement after the main thread has made progress."""
        self._last = None

    def computes(self) -> bool:
        """Return True if other threads or child processes have used enough CPU time since the last call.

        The CPU time of the calling thread is not counted.
        """
        last, self._last = self._last, _sample()
        if last is None:
            return False
        used = [self._last.own - last.own]
        used += [seconds - last.children.get(child, 0.0) for child, seconds in self._last.children.items()]
        return sum(used) > _SHARE * (self._last.at - last.at)


def _sample() -> _Sample:
    """Return the CPU time used by this process's other threads and by its child processes."""
    own = time.process_time() - time.thread_time()
    found = {}
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used = child.cpu_times()
                found[child.pid, child.create_time()] = used.user + used.system
    return _Sample(time.monotonic(), own, found)
