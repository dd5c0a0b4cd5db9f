"""Measure how fast each rank computes, by timing the forward pass of one micro-batch per step.

Every rank's step takes as long as that of the slowest rank. Ranks differ in the work that they do before they
communicate: loading data, and processing the first micro batch with their part of the model. Each rank
measures this work, with the device's clock if there is one, and one exchange per log event collects the
times.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.pretrain.report.slow_ranks import slow_ranks

STEPS = 20  # so many in a row are no chance


@dataclass(frozen=True)
class Place:
    """The machine and the pipeline stage of a rank.

    Attributes:
        host: its machine.
        stage: its pipeline stage; all ranks of a stage perform the same computation.
    """

    host: str
    stage: int


class RankTimes:
    """Time one forward pass per step on this rank, and compare the ranks.

    This is disabled for a single rank.

    Args:
        measures: whether to measure; False if the kernels of a step are replayed as a graph.
    """

    def __init__(self, *, measures: bool) -> None:
        self.places: list[Place] = []
        self._measures = measures and dist.get_world_size() > 1
        self._due = False
        self._marks: list[tuple[Any, Any]] = []
        self._slow_steps: dict[int, int] = {}  # of each rank that is slow now, for so many
        if self._measures:
            self.places = _places()

    def begin(self) -> None:
        """Begin a step, whose first forward pass is timed."""
        self._due = self._measures

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a micro-batch and, if it is the first of a step, times it."""

        @functools.wraps(step)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self._due:
                return step(*args, **kwargs)
            self._due = False
            begin = _mark()
            result = step(*args, **kwargs)
            self._marks.append((begin, _mark()))
            return result

        return measured if self._measures else step

    def take(self) -> list[float]:
        """Return the mean time of each rank's forward passes since the last call, in milliseconds.

        The list is empty if measuring is disabled.

        A collective: all ranks must call it.
        """
        if not self._measures:
            return []
        marks, self._marks = self._marks, []
        own = sum(map(_milliseconds, marks)) / len(marks) if marks else 0.0
        mine = torch.tensor([own], dtype=torch.float32, device=devices.current().torch_device())
        every = [torch.empty_like(mine) for _ in self.places]
        dist.all_gather(every, mine)
        return torch.cat(every).tolist()

    def slow(self, milliseconds: Sequence[float], steps: int) -> str | None:
        """Return a log line about ranks that have become slow, or None if there are no such ranks.

        Each rank is reported once until it recovers.

        Args:
            milliseconds: the result of ``take``.
            steps: the number of steps that they cover.
        """
        found = slow_ranks(milliseconds, [place.stage for place in self.places])
        before = self._slow_steps
        self._slow_steps = {rank: before.get(rank, 0) + steps for rank in found}
        told = [rank for rank, sum_ in self._slow_steps.items() if before.get(rank, 0) < STEPS <= sum_]
        if not told:
            return None
        named = ", ".join(
            f"rank {rank} on {self.places[rank].host} ({milliseconds[rank]:.1f} ms, {found[rank]:.1f} times)"
            for rank in told
        )
        return (
            f" ranks whose forward passes are slower than the median of ranks with the same layers: {named}"
        )


def _places() -> list[Place]:
    from megatron.core import parallel_state

    every: list[Any] = [None] * dist.get_world_size()
    own = (socket.gethostname(), parallel_state.get_pipeline_model_parallel_rank())
    dist.all_gather_object(every, own)
    return [Place(*each) for each in every]


def _mark() -> Any:
    """Return the current time as a time on the host, or as an event in the device's queue."""
    device = devices.current()
    if device.is_host:
        return time.perf_counter()
    event = getattr(torch, device.torch_device().type).Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(marks: tuple[Any, Any]) -> float:
    begin, end = marks
    if isinstance(begin, float):
        return (end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))
