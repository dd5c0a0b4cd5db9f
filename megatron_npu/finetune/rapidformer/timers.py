"""Provide timers with Megatron's interface: ``timers("forward").start()``, ``.stop()``, ``.elapsed()``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_npu import devices


class Timer:
    """Timer that adds up the times between ``start`` and ``stop``, including work on the device.

    Args:
        name: the name of the timer in the log.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._seconds = 0.0
        self._since: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start the timer.

        With ``barrier``, wait until all ranks have arrived.
        """
        if self._since is not None:
            raise RuntimeError(f"timer {self.name!r} has already been started")
        _wait(barrier)
        self._since = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer after the queued work on the device has finished."""
        if self._since is None:
            raise RuntimeError(f"timer {self.name!r} has not been started")
        _wait(barrier)
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def reset(self) -> None:
        """Set the accumulated time to zero."""
        self._seconds, self._since = 0.0, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the accumulated time in seconds.

        A running timer continues to run.

        Args:
            reset: whether to reset the time.
            barrier: whether to wait for all ranks first.
        """
        running = self._since is not None
        if running:
            self.stop(barrier)
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        if running:
            self.start()
        return seconds


class Timers:
    """A collection of timers by name."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer with the given name, creating it if necessary.

        Args:
            name: name of the timer.
            log_level: accepted for compatibility; all timers are kept.
        """
        return self._timers.setdefault(name, Timer(name))

    def log(self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True) -> str:
        """Print a line with the times of the given timers on this rank, in milliseconds, and return it.

        Args:
            names: names of the timers. If None, all timers are included.
            normalizer: divisor, for example the number of iterations.
            reset: whether to reset the timers.
        """
        chosen = [name for name in names or self._timers if name in self._timers]
        parts = [f"{name}: {self._timers[name].elapsed(reset) * 1e3 / normalizer:.2f}" for name in chosen]
        line = f" time (ms) | {' | '.join(parts)}"
        print(line, flush=True)
        return line


def _wait(barrier: bool) -> None:
    import torch.distributed as dist

    if barrier and dist.is_initialized():
        dist.barrier()
    devices.current().synchronize()
