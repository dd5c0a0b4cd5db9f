"""Batch size ramp-up over the first samples of a run (``--rampup-batch-size``)."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """The growth of the batch size, which depends on the number of samples, as in megatron-core's calculator.

    Attributes:
        start: samples in the first global batches.
        increment: samples added by each step.
        samples: samples used up to the last step.
        last: the final size, ``--global-batch-size``.
    """

    start: int
    increment: int
    samples: int
    last: int

    @staticmethod
    def of(args: Namespace) -> Ramp | None:
        """Return the ramp for the flags, or None if the size is constant."""
        words = getattr(args, "rampup_batch_size", None)
        if not words:
            return None
        start, increment, samples = words
        return Ramp(start, increment, samples, args.global_batch_size)

    def size(self, consumed: int) -> int:
        """Return the size of the next global batch after ``consumed`` samples."""
        if consumed > self.samples:
            return self.last
        steps = (self.last - self.start) // self.increment
        return self.start + int(consumed / (self.samples / steps)) * self.increment  # upstream's rounding

    def iterations(self, begin: int, end: int) -> int:
        """Return the number of whole global batches between two sample counts."""
        count = 0
        while begin <= self.samples and begin + (size := self.size(begin)) <= end:
            begin += size
            count += 1
        if begin > self.samples:
            count += max(0, end - begin) // self.last
        return count
