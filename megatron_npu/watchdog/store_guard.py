"""Ends a rank whose network is cut: the store's connection then says nothing, and ends after a quarter hour.

The watchdog's own thread is the one that waits for it. So a second one looks whether that gets on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from megatron_npu.process import stacks

_PERIOD = 1.0  # seconds between two looks
_PAUSE = 5.0  # at most so many count between two: the whole process was stopped then
_EXIT = 1


class StoreGuard:
    """A thread that ends the process where the store has not answered for too long.

    Args:
        limit: seconds that are too many.
        tell: given the seconds, what to say.
    """

    def __init__(self, limit: float, tell: Callable[[float], str]) -> None:
        self._limit, self._tell = limit, tell
        self._stopping = threading.Event()
        self._answers = 0
        self._thread = threading.Thread(target=self._run, name="megatron_npu store", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End: the store is not asked any more."""
        self._stopping.set()

    def answered(self) -> None:
        """Note that the store has answered."""
        self._answers += 1

    def _run(self) -> None:
        known, silent, before = -1, 0.0, time.monotonic()
        while not self._stopping.wait(_PERIOD):
            now = time.monotonic()
            silent += min(now - before, _PAUSE)
            before = now
            if known != self._answers:
                known, silent = self._answers, 0.0
            elif silent > self._limit:
                print(f"megatron_npu: {self._tell(silent)}", file=sys.stderr, flush=True)
                stacks.print_now()
                os._exit(_EXIT)
