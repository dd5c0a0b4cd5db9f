"""Signals that ask a run to save and end (``--exit-signal-handler``)."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Termination:
    """Remembers SIGTERM and Ctrl-C inside the block, so that the loop can end between two iterations.

    A second signal of the same kind does what it always does: it ends the process at once.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Termination:
        if self.enabled:
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        signal.signal(number, self._before[signal.Signals(number)])

    def requested(self) -> bool:
        """Return whether any process has received one; all ranks must call this."""
        if not self.enabled or dist.get_world_size() == 1:
            return self._received
        anyone = torch.tensor(float(self._received), device=devices.current().torch_device())
        dist.all_reduce(anyone, dist.ReduceOp.MAX)
        return bool(anyone.item())
