"""Compute the length of a training run once, when the data is loaded."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.run.flag_parts import LengthFlags
from megatron_npu.pretrain.flags.frozen_flags import Flags


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
    def of(cls, flags: LengthFlags, batches: int, samples: int | None = None) -> RunPlan:
        """Return the plan of a training run.

        The run ends at --epochs or --train-iters, whichever comes first.

        Args:
            flags: the flags about the length.
            batches: batches per rank and epoch.
            samples: see ``RunPlan``.

        Raises:
            UsageError: neither --epochs nor --train-iters is given.
        """
        epoch = batches // flags.num_microbatches
        of_epochs = None if flags.epochs is None else flags.epochs * epoch
        ends = [end for end in (flags.train_iters, of_epochs) if end is not None]
        if not ends:
            raise UsageError(
                "neither --epochs nor --train-iters was given. Pass one of them: --epochs N or "
                "--train-iters N."
            )
        return cls(min(ends), epoch, flags.num_microbatches, samples)

    def settled(self, args: Namespace) -> Flags:
        """Return the flags, frozen, with the lengths from the plan, for logs, checkpoints and model cards."""
        lengths = {"train_iters": self.iterations, "epoch_iters": self.epoch, "train_samples": self.samples}
        return Flags(**vars(args)).changed(**lengths)
