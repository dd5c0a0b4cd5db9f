"""Read the history of a run from its JSON-lines file, and plot it."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_npu.base import files

Points = dict[int, float]  # by iteration


@dataclass
class History:
    """The logged history of a run and of the runs from which it was resumed.

    Attributes:
        losses: training loss of every iteration.
        learning_rates, grad_norms: values at the logged iterations.
        throughput, memory: tokens per second and peak bytes at the logged iterations.
        utilization: device utilization at the logged iterations, from 0 to 1.
        validation: validation losses.
        evaluated: losses of training samples that were evaluated at the same time.
        samples: samples generated at an iteration, each with its ``prompt`` and ``text``.
        hosts, stages: the machine and the pipeline stage of each rank; empty for a single rank.
        forward_ms: the forward time of each rank at the last logged iteration.
        start, last, end: the values of the last ``start``, ``train`` and ``end`` object; empty if there is no
            such object.
    """

    losses: Points = field(default_factory=dict)
    learning_rates: Points = field(default_factory=dict)
    throughput: Points = field(default_factory=dict)
    memory: Points = field(default_factory=dict)
    utilization: Points = field(default_factory=dict)
    grad_norms: Points = field(default_factory=dict)
    validation: Points = field(default_factory=dict)
    evaluated: Points = field(default_factory=dict)
    samples: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    start: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add the event in one JSON object to the history.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the object was not written by a run; the
                file may be untrusted.
        """
        if type(row["iteration"]) is not int or not 0 <= row["iteration"] < _MANY:
            raise ValueError(f"the iteration is {row['iteration']!r}, which is not an iteration number")
        taking = {
            "start": self._restart,
            "ranks": self._place,
            "train": self._train,
            "validation": self._validate,
            "sample": self._sample,
            "rewind": self._go_back,
            "end": self._finish,
        }
        if take := taking.get(row["event"]):
            take(row)

    def _place(self, row: dict[str, Any]) -> None:
        self.hosts = [_text(host) for host in row["hosts"]]
        self.stages = [int(_number(stage)) for stage in row["stages"]]

    def _validate(self, row: dict[str, Any]) -> None:
        _note(self.validation, row["iteration"], row["loss"])
        _note(self.evaluated, row["iteration"], row.get("training_loss"))

    def _sample(self, row: dict[str, Any]) -> None:
        texts = self.samples.setdefault(row["iteration"], [])
        texts.append({name: _text(row[name]) for name in ("prompt", "text")})

    def _go_back(self, row: dict[str, Any]) -> None:
        self._forget_after(row["iteration"])

    def _finish(self, row: dict[str, Any]) -> None:
        self.end = row

    def _restart(self, row: dict[str, Any]) -> None:
        """Discard everything after the iteration from which a resumed run continues."""
        for name in _COUNTED:
            value = row.get(name)
            if value is not None and not (type(value) is int and 0 <= value < _MANY):
                raise ValueError(f"{name} is {value!r}")
        self.start, self.last, self.end = row, {}, {}
        self.hosts, self.stages, self.forward_ms = [], [], []
        self._forget_after(row["iteration"])

    def _forget_after(self, iteration: int) -> None:
        for points in filter(lambda value: isinstance(value, dict), vars(self).values()):
            for number in [n for n in points if isinstance(n, int) and n > iteration]:
                del points[number]

    def _train(self, row: dict[str, Any]) -> None:
        iteration = row["iteration"]
        if not 0 <= (row.get("global_batch_size") or 0) < _MANY:
            raise ValueError(f"global_batch_size is {row['global_batch_size']!r}")
        first = iteration - len(row["losses"]) + 1
        for number, loss in enumerate(row["losses"], first):
            _note(self.losses, number, loss)
        for points, name in (
            (self.learning_rates, "learning_rate"),
            (self.throughput, "tokens_per_second"),
            (self.memory, "peak_memory_bytes"),
            (self.utilization, "utilization"),
            (self.grad_norms, "grad_norm"),
        ):
            _note(points, iteration, row.get(name))
        self.forward_ms = [_number(each) for each in row.get("forward_ms_of_ranks", [])]
        self.last = {name: value for name, value in row.items() if not isinstance(value, list)}


_MANY = 1 << 63
_COUNTED = ("global_batch_size", "seq_length", "train_iters")  # what the dashboard computes with


def _note(points: Points, iteration: int, value: float | None) -> None:
    if value is not None:  # as JSON says a number that is not one
        points[iteration] = _number(value)


def _number(value: float) -> float:
    if not math.isfinite(value):  # which takes numbers alone, and none that no float can hold
        raise ValueError(f"{value} is not a finite number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


class Reader:
    """Reads the file that ``log.Log`` writes, including lines that are added later.

    Args:
        path: the file; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History()
        self._place = 0
        self._inode = -1

    def update(self) -> bool:
        """Read new lines from the file, and return True if there were any.

        An incomplete line is left for the next call, and an invalid line is skipped. A file that has been
        replaced is read again from its beginning.
        """
        if not self.path.is_file():
            return False
        with files.regular(self.path) as stream:
            found = os.fstat(stream.fileno())
            if found.st_ino != self._inode or found.st_size < self._place:
                self.history, self._place, self._inode = History(), 0, found.st_ino
            stream.seek(self._place)
            lines = stream.read().rpartition(b"\n")[0]
        self._place += len(lines) + 1 if lines else 0
        for line in lines.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.history.add(json.loads(line))
        return bool(lines)


def read(path: Path) -> History:
    """Read the history from the file that ``log.Log`` writes."""
    reader = Reader(path)
    reader.update()
    return reader.history


def draw(history: History, path: Path) -> None:
    """Write a PNG plot of the training and validation losses (top) and the learning rate (bottom).

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``validation.check`` checks this earlier).
    """
    with _without_old_garbage():
        _draw(history, path)


@contextlib.contextmanager
def _without_old_garbage() -> Iterator[None]:
    """Free objects in reference cycles that the ``with`` block created, such as a figure, at the end of the
    block.

    Otherwise, Python's collector would find them only among the old objects, dozens of plots and some hundred
    megabytes later. The collector is disabled in the block, so the objects stay in the young generation,
    which is quick to collect.
    """
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if ran:
            gc.enable()


def _draw(history: History, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss.plot(list(history.losses), list(history.losses.values()), linewidth=1, label="training")
    if history.validation:
        loss.plot(list(history.validation), list(history.validation.values()), "o-", label="validation")
    if history.evaluated:
        loss.plot(
            list(history.evaluated), list(history.evaluated.values()), ".--", label="training, evaluated"
        )
    loss.set_ylabel("loss")
    loss.legend()
    rate.plot(list(history.learning_rates), list(history.learning_rates.values()), linewidth=1)
    rate.set_ylabel("learning rate")
    rate.set_xlabel("iteration")
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    with files.writing(path) as stream:
        FigureCanvasAgg(figure).print_png(stream)
