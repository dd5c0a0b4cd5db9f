"""Define the inputs and the result of a run of the built-in trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_npu.pretrain.checkpoint.checkpoints import Position, State
from megatron_npu.pretrain.data.datasets import Datasets


class Prepared(NamedTuple):
    """The model to train and its data.

    Attributes:
        state: the model, optimizer and schedule.
        datasets: the training, validation and test datasets.
        position: where the run starts.
    """

    state: State
    datasets: Datasets
    position: Position


@dataclass
class Outcome:
    """The result of the training loop.

    Attributes:
        position: where the loop ended.
        loss_first, loss_last: the training loss of the first and last iteration of this process.
        validation_loss: the loss of the last evaluation; with several sets, their mean.
        validation_losses: the loss of each of several sets, by its prefix.
        test_loss: the loss of the final evaluation on --test-data-path.
        seconds, steps: the training time, without evaluation and saving, and the number of steps.
        samples: the samples of all ranks in these steps.
        first_seconds, first_steps, first_samples: the part up to the first log event, which includes warm-up.
        checkpoint: the last checkpoint that was written.
        ended_by: ``iterations``, ``exit-interval``, ``exit-duration`` or ``signal``.
    """

    position: Position
    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    validation_losses: dict[str, float] = field(default_factory=dict)
    test_loss: float | None = None
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    first_seconds: float = 0.0
    first_steps: int = 0
    first_samples: int = 0
    checkpoint: Path | None = None
    ended_by: str = "iterations"

    def samples_per_second(self) -> float | None:
        """Return the number of samples per second, or None if no step has run.

        The warm-up is excluded if there are later steps.
        """
        if self.steps > self.first_steps:
            return (self.samples - self.first_samples) / (self.seconds - self.first_seconds)
        return self.samples / self.seconds if self.steps else None
