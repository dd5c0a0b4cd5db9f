"""Collect the data that the dashboard shows in one JSON object."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_npu.pretrain.report.history import History, Points, Reader
from megatron_npu.pretrain.report.slow_ranks import slow_ranks

POINTS = 1000  # of a curve; more than a screen has pixels for
SAMPLES = 20  # texts, the newest
_PAUSE = 20  # a snapshot is taken again after so many times what the last one cost
_RECENT = 10  # log events whose speed says how long the rest takes
_COUNTS = ("world_size", "train_iters", "global_batch_size", "seq_length")


class Run:
    """A run whose data is read from its JSON-lines file, to which lines may still be added.

    Args:
        metrics: the file; it may not exist yet.
        name: title of the run.
    """

    def __init__(self, metrics: Path, name: str) -> None:
        self.metrics, self.name = metrics, name
        self._reader = Reader(metrics)
        self._lock = threading.Lock()
        self._text, self._version, self._next = "", 0, 0.0

    def snapshot(self, at_once: bool = False) -> tuple[int, str]:
        """Return the newest state of the run as JSON, and a version number that increases with each change.

        The curves of a long run are not processed again on every call.

        Args:
            at_once: whether to include the newest lines in any case, even if this takes long.
        """
        with self._lock:
            begin = time.monotonic()
            if at_once or begin >= self._next:
                if self._reader.update() or not self._text:
                    self._version += 1
                    state = _state(self._reader.history) | {"name": self.name, "updated": self._updated()}
                    self._text = json.dumps(state, allow_nan=False)
                self._next = time.monotonic() + _PAUSE * (time.monotonic() - begin)
            return self._version, self._text

    def _updated(self) -> float | None:
        try:
            return self.metrics.stat().st_mtime
        except OSError:
            return None


def _state(history: History) -> dict[str, Any]:
    last = history.last
    return {
        **{name: _number(history.start.get(name)) for name in _COUNTS},
        "device": _text(history.start.get("device")),
        "iteration": _iteration(history),
        "ended_by": _text(history.end.get("ended_by")),
        "seconds_left": _seconds_left(history),
        "latest": {
            "loss": _number(last.get("loss")),
            "validation": _newest(history.validation),
            **{
                name: _number(last.get(name))
                for name in (
                    "learning_rate",
                    "tokens_per_second",
                    "tflops_per_device",
                    "memory_bytes",
                    "peak_memory_bytes",
                    "utilization",
                    "grad_norm",
                    "consumed_samples",
                    "epoch",
                )
            },
        },
        "curves": {
            "loss": thinned(history.losses),
            "validation": thinned(history.validation),
            "evaluated": thinned(history.evaluated),
            "learning_rate": thinned(history.learning_rates),
            "tokens_per_second": thinned(history.throughput),
            "peak_memory_bytes": thinned(history.memory),
            "utilization": thinned(history.utilization),
            "grad_norm": thinned(history.grad_norms),
        },
        "machines": _machines(history),
        "samples": _samples(history),
    }


def _number(value: Any) -> float | None:
    """Return a finite number unchanged, and None for any other value.

    The file is untrusted.
    """
    try:
        return value if type(value) in (int, float) and math.isfinite(value) else None
    except OverflowError:  # an int that no float can hold
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _iteration(history: History) -> int:
    return max(history.start.get("iteration", 0), history.last.get("iteration", 0))


def _seconds_left(history: History) -> float | None:
    """Return an estimate of the remaining training time in seconds, or None if it is unknown."""
    batch = history.last.get("global_batch_size") or history.start.get("global_batch_size") or 0
    tokens = batch * (history.start.get("seq_length") or 0)
    speeds = list(history.throughput.values())[-_RECENT:]
    total = history.start.get("train_iters")
    speed = statistics.median(speeds) if speeds else 0
    if history.end or total is None or not speed or not tokens:
        return None
    return max(0, total - _iteration(history)) * tokens / speed


def _newest(points: Points) -> float | None:
    return points[max(points)] if points else None


def _machines(history: History) -> list[dict[str, Any]]:
    """Return the machines with their ranks, the ranks' times in milliseconds, and the slow ranks."""
    times = history.forward_ms
    slow = slow_ranks(times, history.stages)
    found: dict[str, dict[str, Any]] = {}
    for rank, host in enumerate(history.hosts):
        machine = found.setdefault(host, {"host": host, "ranks": [], "milliseconds": [], "slow": []})
        machine["ranks"].append(rank)
        machine["milliseconds"] += times[rank : rank + 1]
        machine["slow"] += [rank] * (rank in slow)
    return list(found.values())


def _samples(history: History) -> list[dict[str, Any]]:
    """Return the newest sample texts, starting with the newest."""
    rows = [
        {"iteration": iteration, **text}
        for iteration in sorted(history.samples, reverse=True)
        for text in history.samples[iteration]
    ]
    return rows[:SAMPLES]


def thinned(points: Points, most: int = POINTS) -> dict[str, list[float]]:
    """Return a curve with at most ``most`` points, as lists ``x`` and ``y``.

    A long curve is divided into equal intervals and reduced to their means and extremes.

    Args:
        points: values by iteration, all finite.
        most: maximum number of points.

    Returns:
        ``x``: the last iteration of each interval; ``y``: its mean; ``low``, ``high`` (only for a reduced
        curve): its minimum and maximum.
    """
    x = np.fromiter(points, np.int64, len(points))
    y = np.fromiter(points.values(), np.float64, len(points))
    order = np.argsort(x, kind="stable")  # a run that went on from an earlier point may have added some later
    x, y = x[order], y[order]
    if len(x) <= most:
        return {"x": x.tolist(), "y": y.tolist()}
    begins = np.linspace(0, len(x), most, endpoint=False).astype(np.int64)
    ends = np.append(begins[1:], len(x))
    return {
        "x": x[ends - 1].tolist(),
        "y": (np.add.reduceat(y, begins) / (ends - begins)).tolist(),
        "low": np.minimum.reduceat(y, begins).tolist(),
        "high": np.maximum.reduceat(y, begins).tolist(),
    }
