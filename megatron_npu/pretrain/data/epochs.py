"""Order the training samples in epochs.

Each sample occurs once per epoch, and each epoch has a new order.

megatron-core has no epochs: a dataset that must return more samples than its documents contain shuffles
several passes together. Here the dataset returns one pass, and ``Passes`` defines the order of each pass.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.pretrain.data.sources import blend, sizes_of_parts, split_shares
from megatron_npu.pretrain.flags.plan_parts import SourceFlags


def samples_of_one(flags: SourceFlags) -> int:
    """Return the number of samples in one epoch over the training documents.

    The last token of a sample is the first token of the next one, as in megatron-core's GPTDataset. If
    ``--data-path`` has weights, an epoch has the same number of samples, sampled with these weights.
    """
    flag = "--train-data-path" if flags.train_data_path else "--data-path"
    words = flags.train_data_path or flags.data_path or []
    return sum(
        max(0, _training_tokens(flags, prefix) - 1) // flags.seq_length for prefix in blend(words, flag)[1]
    )


def _training_tokens(flags: SourceFlags, prefix: str) -> int:
    lengths = indexed_dataset.sequence_lengths(prefix)
    if not flags.train_data_path:
        lengths = lengths[: sizes_of_parts(split_shares(flags.split), len(lengths))[0]]
    return int(lengths.sum(dtype=np.int64))


class RoundAndRound:
    """A sample order that repeats the order of the dataset endlessly."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, number: int) -> int:
        """Return the index of the sample at a position, counted from 0."""
        return number % self.samples


class Passes:
    """A sample order that consists of consecutive epochs.

    The first epoch uses the dataset's order, which is already shuffled.

    Args:
        samples: the number of samples per epoch.
        seed: the random seed. The seed and the number of the epoch determine the order, so a run can resume
            at any position.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a batch may lie in two epochs

    def __call__(self, number: int) -> int:
        """Return the index of the sample at a position, counted from 0 over all epochs."""
        epoch, place = divmod(number, self.samples)
        return place if epoch == 0 else int(self._order(epoch)[place])

    def _shuffled(self, epoch: int) -> np.ndarray:
        kind = np.uint32 if self.samples < 2**32 else np.int64
        return np.random.RandomState((self.seed + epoch) % 2**32).permutation(
            np.arange(self.samples, dtype=kind)
        )
