"""Implement ``--rampup-batch-size``, which increases the batch size over the first samples of a run."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """The batch size as a function of the number of samples, as in megatron-core's calculator.

    Attributes:
        start: the size of the first global batches.
        increment: the number of samples that each step adds.
        samples: the number of samples after which the final size is reached.
        last: the final size, ``--global-batch-size``.
    """

    start: int
    increment: int
    samples: int
    last: int

    @staticmethod
    def of(args: Namespace) -> Ramp | None:
        """Return the batch-size ramp that the flags define, or None if the batch size is constant."""
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
        """Return the number of complete global batches between two sample counts."""
        count = 0
        while begin <= self.samples and begin + (size := self.size(begin)) <= end:
            begin += size
            count += 1
        if begin > self.samples:
            count += max(0, end - begin) // self.last
        return count
