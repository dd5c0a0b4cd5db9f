"""How long training takes."""

from __future__ import annotations

import time

from megatron_npu import devices


class Clock:
    """Seconds of training alone: stopped during evaluation and saving."""

    def __init__(self) -> None:
        self.total = 0.0
        self._lap = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start or go on."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Wait for the device, then stop."""
        devices.current().synchronize()
        elapsed = time.perf_counter() - self._since
        self.total += elapsed
        self._lap += elapsed

    def lap(self) -> float:
        """Return the seconds since the last lap; the clock goes on."""
        self.stop()
        elapsed, self._lap = self._lap, 0.0
        self.start()
        return elapsed
