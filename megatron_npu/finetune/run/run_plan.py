"""Compute the length of a training run once, when the data is loaded."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class RunPlan:
    """The length of one training run of a template.

    A script that trains several times has several plans.

    Attributes:
        iterations: the number of iterations of the run, unless it ends earlier.
        epoch: the number of iterations per epoch.
        micro_batches: the number of micro-batches per rank and iteration.
        samples: the number of samples for fine-tuning, or None for pre-training, which draws as many samples
            as needed.
    """

    iterations: int
    epoch: int
    micro_batches: int
    samples: int | None = None

    @classmethod
    def of(cls, args: Namespace, batches: int, samples: int | None = None) -> RunPlan:
        """Return the plan of a training run.

        The run ends at --epochs or --train-iters, whichever comes first.

        Args:
            args: the flags with ranks.
            batches: batches per rank and epoch.
            samples: see ``RunPlan``.

        Raises:
            UsageError: neither --epochs nor --train-iters is given.
        """
        epoch = batches // args.num_microbatches
        of_epochs = None if args.epochs is None else args.epochs * epoch
        ends = [end for end in (args.train_iters, of_epochs) if end is not None]
        if not ends:
            raise UsageError(
                "neither --epochs nor --train-iters was given. Pass one of them: --epochs N or "
                "--train-iters N."
            )
        return cls(min(ends), epoch, args.num_microbatches, samples)

    def settled(self, args: Namespace) -> Namespace:
        """Return the flags with the lengths from the plan, for logs, checkpoints and model cards."""
        lengths = {"train_iters": self.iterations, "epoch_iters": self.epoch, "train_samples": self.samples}
        return Namespace(**{**vars(args), **lengths})
