"""The length of a training, computed once when its data are loaded."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class RunPlan:
    """The length of one training of a template; a script that trains several times has one for each.

    Attributes:
        iterations: of the training, where nothing ends it before.
        epoch: iterations of an epoch.
        micro_batches: of a rank in an iteration.
        samples: to fine-tune on; None in a pre-training, which draws as many as it needs.
    """

    iterations: int
    epoch: int
    micro_batches: int
    samples: int | None = None

    @classmethod
    def of(cls, args: Namespace, batches: int, samples: int | None = None) -> RunPlan:
        """Return the plan of a training; of --epochs and --train-iters, what comes first ends it.

        Args:
            args: the flags, with their ranks.
            batches: of a rank in an epoch.
            samples: as above.

        Raises:
            UsageError: neither --epochs nor --train-iters is given.
        """
        epoch = batches // args.num_microbatches
        of_epochs = None if args.epochs is None else args.epochs * epoch
        ends = [end for end in (args.train_iters, of_epochs) if end is not None]
        if not ends:
            raise UsageError(
                "neither --epochs nor --train-iters", "--epochs N or --train-iters N", "Pass one of them."
            )
        return cls(min(ends), epoch, args.num_microbatches, samples)

    def settled(self, args: Namespace) -> Namespace:
        """Return the flags with the plan's lengths, as a log, a checkpoint and a model card tell them."""
        lengths = {"train_iters": self.iterations, "epoch_iters": self.epoch, "train_samples": self.samples}
        return Namespace(**{**vars(args), **lengths})
