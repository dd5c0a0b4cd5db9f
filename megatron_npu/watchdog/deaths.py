"""Which processes of this machine have ended: the kernel tells at once."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterable

from megatron_npu.watchdog.board import Process


class Deaths:
    """Waits for the end of processes, or until it is woken.

    Args:
        processes: those to wait for.

    Attributes:
        gone: those that had ended before.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = os.pipe()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self.gone: list[Process] = []
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                self.gone.append(process)
            except (
                AttributeError,
                OSError,
            ):  # no Linux, or an old one: its word stops, later
                continue
            else:
                self._selector.register(descriptor, selectors.EVENT_READ, process)

    def wait(self, seconds: float) -> list[Process]:
        """Return processes that have ended, as soon as there are any; when woken or after a time nothing."""
        found, self.gone = self.gone, []
        for key, _ in self._selector.select(0 if found else seconds):
            if key.data is None:
                os.read(self._bell, 64)
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                found.append(key.data)
        return found

    def wake(self) -> None:
        """Let a ``wait`` in another thread, or the next one, return at once."""
        with contextlib.suppress(OSError):
            os.write(self._button, b".")
