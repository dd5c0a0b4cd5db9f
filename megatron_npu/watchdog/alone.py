"""Watch a run in a single process: end it if it hangs, and report where it hangs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from megatron_npu.process import stacks
from megatron_npu.watchdog.stillness import Stillness

_PERIOD = 1.0  # seconds between two looks
_PATIENCE = 5.0  # seconds for the thread to end
_EXIT = 1


class Alone:
    """Thread that ends the process if its main thread hangs while the process group exists.

    Args:
        limit: the maximum number of seconds without progress.
        step_now: a function that returns the number of the current training step.
    """

    def __init__(self, limit: float, step_now: Callable[[], int]) -> None:
        self._limit = limit
        self._stillness = Stillness(limit, step_now)
        self._thread = threading.Thread(target=self._run, name="megatron_npu watchdog", daemon=True)
        self._owner = os.getpid()
        self._stopping = threading.Event()

    @property
    def watches(self) -> bool:
        """True if this watchdog is active. It is inactive in a forked child and without a process group."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the watchdog thread."""
        atexit.register(self.stop)
        stacks.print_on_signal()
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog thread."""
        if os.getpid() == self._owner:
            atexit.unregister(self.stop)
            self._stopping.set()
            self._thread.join(_PATIENCE)

    def failed(self, error: BaseException) -> bool:
        """Return False, because no other rank can have caused the error."""
        return False

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD) and dist.is_initialized():
            beat = self._stillness.look()
            if beat.still >= self._limit:
                told = f"it has made no progress for {self._limit:.0f} s; it is {beat}{beat.stack()}"
                print(f"megatron_npu: the run is stopped: {told}", file=sys.stderr, flush=True)
                stacks.print_now()
                os._exit(_EXIT)
