"""Wait for signals and for the end of processes on this machine, both of which the kernel reports
immediately.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Iterable

from megatron_npu.watchdog.board import Process

_WAKE = 0  # no signal has this number


class Deaths:
    """Waits until a process ends, a signal arrives, or another thread ends the wait.

    Attributes:
        gone: the watched processes that had already ended.
        signals: the numbers of the signals that were received since the set was last cleared.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = os.pipe()
        os.set_blocking(self._button, False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._former: int | None = None
        self.gone: list[Process] = []
        self.signals: set[int] = set()

    def watch(self, processes: Iterable[Process]) -> None:
        """Add processes whose end ``wait`` should report."""
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self.gone.append(process)
            except (AttributeError, OSError):  # no Linux, or an old one: its word stops, later
                continue
            else:
                self._selector.register(descriptor, selectors.EVENT_READ, process)

    def listen(self) -> None:
        """Make signals that Python handles end ``wait``, and record them in ``signals``.

        Use this only if nothing else, such as an asyncio loop, receives the wake-ups.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._former = signal.set_wakeup_fd(self._button, warn_on_full_buffer=False)
        if self._former != -1:
            self.ignore()

    def ignore(self) -> None:
        """Undo ``listen``, so that signals no longer end ``wait``."""
        if self._former is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._former)
            self._former = None

    def wait(self, seconds: float) -> list[Process]:
        """Wait for processes to end, and return those that have ended.

        The result is empty after a wake-up or the timeout.
        """
        found, self.gone = self.gone, []
        for key, _ in self._selector.select(0 if found else seconds):
            if key.data is None:
                self.signals.update({*os.read(self._bell, 64)} - {_WAKE})
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                found.append(key.data)
        return found

    def wake(self) -> None:
        """Make the current ``wait`` call of another thread, or the next call, return immediately."""
        with contextlib.suppress(OSError):
            os.write(self._button, bytes([_WAKE]))
