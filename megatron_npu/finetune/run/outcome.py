"""The result of a training, for model cards and callers of a template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: the mean loss, and metrics by their names."""

    loss: float
    metrics: dict[str, float]


@dataclass
class Outcome:
    """How a training went.

    Attributes:
        iteration: the last one.
        losses: training loss of each iteration of this process's run, the mean over all ranks and samples.
        grad_norms: the norm of each iteration's gradient; None where the update was left out.
        evaluations: what was found, by iteration.
        test: what was found on the test data at the end; None without.
        checkpoint: the last one written; None without.
        exported: the folder for ``from_pretrained``; None without.
        plot: the picture of the run; None without.
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
