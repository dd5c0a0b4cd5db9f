"""End a rank that has lost its network connection to the store.

The connection to the store would fail only after 15 minutes.

The watchdog's own thread waits for the store, so a second thread checks whether the store still answers.
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
    """Thread that ends the process if the store does not answer in time.

    Args:
        limit: the maximum number of seconds without an answer.
        tell: returns the message for a number of seconds.
    """

    def __init__(self, limit: float, tell: Callable[[float], str]) -> None:
        self._limit, self._tell = limit, tell
        self._stopping = threading.Event()
        self._answers = 0
        self._thread = threading.Thread(target=self._run, name="megatron_npu store", daemon=True)

    def start(self) -> None:
        """Start the thread that guards the store."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread.

        Call this when the store is no longer used.
        """
        self._stopping.set()

    def answered(self) -> None:
        """Record that the store has just answered."""
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
