"""Measure the time that a run spends on training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from megatron_npu import devices


class Clock:
    """Clock that measures only the time spent on training.

    The clock is stopped during evaluation, sampling and saving.

    The clock is initially stopped.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._lap = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start the clock, or resume it."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Wait until the device has finished its work, and stop the clock.

        This has no effect if the clock is already stopped.
        """
        if self._since is None:
            return
        devices.current().synchronize()
        elapsed = time.perf_counter() - self._since
        self.total += elapsed
        self._lap += elapsed
        self._since = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the duration of the ``with`` block.

        If it was running before, it is resumed afterwards.
        """
        stood = self._since is None
        self.stop()
        try:
            yield
        finally:
            if not stood:
                self.start()

    def lap(self) -> float:
        """Return the time in seconds since the previous call, without stopping the clock."""
        with self.paused():
            elapsed, self._lap = self._lap, 0.0
        return elapsed
