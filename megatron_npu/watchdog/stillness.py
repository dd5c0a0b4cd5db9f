"""Measure how long the main thread, and threads or processes that work for it, have made no progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_npu.watchdog import place, sending
from megatron_npu.watchdog.board import Beat
from megatron_npu.watchdog.elsewhere import Elsewhere
from megatron_npu.watchdog.phases import LOADING, SAVING
from megatron_npu.watchdog.writing import Writing, current_file

_PAUSE = 5.0  # seconds between two looks: the whole process was stopped, by a signal, say, or its machine


class Stillness:
    """Checks the position of the main thread about once per second.

    Args:
        limit: the maximum number of seconds without progress.
        step_now: returns the number of the training step, or 0 if none has started.
    """

    def __init__(self, limit: float, step_now: Callable[[], int]) -> None:
        self._limit, self._step_now = limit, step_now
        self._elsewhere, self._writing, self._sending = Elsewhere(), Writing(), sending.Sending()
        self._number, self._step = 0, -1
        self._mark: tuple[object, ...] = ()
        self._moved = self._looked = time.monotonic()
        self.still = 0.0  # seconds, at the last look

    def look(self) -> Beat:
        """Return the current position of the main thread, and the time since it last changed."""
        now, stands, step = time.monotonic(), place.of_main_thread(), self._step_now()
        if now - self._looked > _PAUSE:  # this thread has not looked either
            self._moved += now - self._looked
        self._looked = now
        if stands.outside or (stands.mark, step) != (self._mark, self._step):
            self._mark, self._step, self._moved = stands.mark, step, now
            self._elsewhere.forget()
            self._writing.forget()
            self._sending.forget()
        elif now - self._moved > self._limit / 10 and self._is_at_work(stands):
            self._moved = now
        self.still = now - self._moved
        file = current_file() if stands.phase == SAVING and self.still > self._limit / 2 else ""
        words = (stands.phase, stands.collective, str(stands), stands.frames, file)
        self._number += 1
        return Beat(self._number - 1, step, self.still, *words)

    def _is_at_work(self, stands: place.Place) -> bool:
        """Return True if other threads compute for the idle main thread, or if saving or loading makes
        progress.
        """
        if self._elsewhere.computes():
            return True
        if stands.phase == SAVING and sending.by_client(stands.frames) and self._sending.gets_on():
            return True
        loads = stands.phase == LOADING
        return (loads or stands.phase == SAVING) and self._writing.gets_on(reads=loads)
