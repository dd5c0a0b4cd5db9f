"""Whether a process is at work although its main thread stands still: in other threads, or in children.

A compiler of graphs, a builder of kernels, a writer of a checkpoint: the main thread waits for them, in one
line of Python and without CPU time of its own, and that is no hang.
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
    """Compares the CPU time that was used with that at the call before.

    Called about once a second, and only while the main thread stands still: to look for children costs
    milliseconds on a machine with many processes.
    """

    _last: _Sample | None = field(default=None)

    def forget(self) -> None:
        """Begin again: the main thread has moved."""
        self._last = None

    def computes(self) -> bool:
        """Return whether other threads (but the caller's) or a child have used a share of a core since."""
        last, self._last = self._last, _sample()
        if last is None:
            return False
        used = [self._last.own - last.own]
        used += [seconds - last.children.get(child, 0.0) for child, seconds in self._last.children.items()]
        return sum(used) > _SHARE * (self._last.at - last.at)


def _sample() -> _Sample:
    """Return the CPU time so far: of this process without this thread, and of what it has started."""
    own = time.process_time() - time.thread_time()
    found = {}
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used = child.cpu_times()
                found[child.pid, child.create_time()] = used.user + used.system
    return _Sample(time.monotonic(), own, found)
