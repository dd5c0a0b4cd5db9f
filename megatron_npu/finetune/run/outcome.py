"""Define the result of a training run, for model cards and for callers of a template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: the mean loss, and the metrics by name."""

    loss: float
    metrics: dict[str, float]


@dataclass
class Outcome:
    """The result of a training run.

    Attributes:
        iteration: the last iteration.
        losses: training loss of each iteration of this process, averaged over all ranks and samples.
        grad_norms: gradient norm of each iteration; None if the update was skipped.
        evaluations: results by iteration.
        test: result on the test data, or None.
        checkpoint: the last checkpoint written, or None.
        exported: the folder for ``from_pretrained``, or None.
        plot: the plot of the run, or None.
        ended_by: ``iterations``, ``exit-interval`` or ``signal``.
    """

    iteration: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    test: Evaluation | None = None
    checkpoint: Path | None = None
    exported: Path | None = None
    plot: Path | None = None
    ended_by: str = "iterations"
