"""The history of a run from its JSON lines, and a picture of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_npu import files


@dataclass
class History:
    """Points of a run and of those that it went on from, by iteration.

    Attributes:
        losses: training loss of every iteration.
        learning_rates: of the logged iterations.
        throughput: tokens per second of the logged iterations.
        validation: validation losses.
        evaluated: losses of training samples that were evaluated together with them.
    """

    losses: dict[int, float] = field(default_factory=dict)
    learning_rates: dict[int, float] = field(default_factory=dict)
    throughput: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    evaluated: dict[int, float] = field(default_factory=dict)

    def restart(self, iteration: int) -> None:
        """Forget what came after ``iteration``: a run begins there."""
        for points in vars(self).values():
            for number in [number for number in points if number > iteration]:
                del points[number]


def read(path: Path) -> History:
    """Read the file that ``log.Log`` writes; a last line that was cut off is left out."""
    history = History()
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        iteration = row["iteration"]
        if row["event"] == "start":
            history.restart(iteration)
        elif row["event"] == "train":
            first = iteration - len(row["losses"]) + 1
            history.losses |= {first + n: x for n, x in enumerate(row["losses"]) if x is not None}
            history.learning_rates[iteration] = row["learning_rate"]
            history.throughput[iteration] = row["tokens_per_second"]
        elif row["event"] == "validation" and row["loss"] is not None:
            history.validation[iteration] = row["loss"]
            if row.get("training_loss") is not None:
                history.evaluated[iteration] = row["training_loss"]
    return history


def draw(history: History, path: Path) -> None:
    """Write a PNG: training and validation loss above, learning rate below.

    Raises:
        ModuleNotFoundError: matplotlib is absent (``validation.check`` asks before).
    """
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
    loss.set_ylabel("lm loss (nats a token)")
    loss.legend()
    rate.plot(list(history.learning_rates), list(history.learning_rates.values()), linewidth=1)
    rate.set_ylabel("learning rate")
    rate.set_xlabel("iteration")
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    with files.writing(path) as stream:
        FigureCanvasAgg(figure).print_png(stream)
