"""Handle requests to save and exit, which come from signals (``--exit-signal-handler``) and the time
limit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Termination:
    """Record the signals received inside the ``with`` block, so that training can end between two iterations.

    A second signal of the same kind has its default effect and ends the process immediately.

    Args:
        enabled: whether signals are recorded.
        signals: the signals; by default SIGTERM and the signal that Ctrl-C sends.
    """

    def __init__(self, enabled: bool, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.enabled, self._signals = enabled, frozenset(signals)  # --exit-signal SIGINT names Ctrl-C twice
        self._received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Termination:
        if self.enabled:
            self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        signal.signal(number, self._before[signal.Signals(number)])

    def requested(self) -> bool:
        """Return True if at least one process has received a signal. All ranks must call this."""
        return _anywhere(self._received) if self.enabled else self._received


class Deadline:
    """Time limit of a run (``--exit-duration-in-mins``).

    Args:
        minutes: the limit. If None, there is no limit and no communication.
        began: the start time of the command, as returned by ``time.monotonic``.
    """

    def __init__(self, minutes: int | None, began: float) -> None:
        self._end = None if minutes is None else began + 60 * minutes

    def has_passed(self) -> bool:
        """Return True if the time limit has passed on at least one process.

        All processes then end together.

        All ranks must call this.
        """
        return self._end is not None and _anywhere(time.monotonic() > self._end)


def _anywhere(here: bool) -> bool:
    if dist.get_world_size() == 1:
        return here
    anyone = torch.tensor(float(here), device=devices.current().torch_device())
    dist.all_reduce(anyone, dist.ReduceOp.MAX)
    return bool(anyone.item())
