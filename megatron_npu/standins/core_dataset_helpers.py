"""Stand-in for ``megatron.core.datasets.helpers_cpp``, megatron-core's C++ extension for dataset indices.

A wheel ships it compiled; in a checkout upstream runs make when training starts, for whichever python3-config
is first on the path. Names and formats are those of ``megatron/core/datasets/helpers.cpp`` of 0.16.1; the
functions that it shares with Megatron-LM 285068c8 are that host's stand-in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_npu.standins.dataset_helpers import (
    Int64,
    build_blending_indices,
    build_blocks_mapping,
    build_mapping,
)

__all__ = [
    "build_blending_indices",
    "build_blocks_mapping",
    "build_exhaustive_blending_indices",
    "build_mapping",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]


def build_sample_idx_int64(
    sizes: NDArray[np.int32],
    document_idx: NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> Int64:
    """Return where each sample of a GPT dataset begins, the documents of all epochs laid end to end.

    Args:
        sizes: ``[documents]``, tokens of each document.
        document_idx: ``[documents * epochs]``, the documents in their order.
        seq_length: tokens from the beginning of a sample to that of the next.
        num_epochs, tokens_per_epoch: their product is the number of tokens.
        drop_last_partial_sequence: leave out a last sample that is too short.
        add_extra_token_to_sequence: 1 if a sample has one token more, the label of the last; or 0.

    Returns:
        ``[samples + 1, 2]``: index into ``document_idx``, offset in that document.
    """
    extra, tokens = add_extra_token_to_sequence, num_epochs * tokens_per_epoch
    if drop_last_partial_sequence:
        samples = (tokens - extra) // seq_length
    else:  # upstream divides in single precision
        samples = int(np.ceil(np.float32(tokens - extra) / np.float32(seq_length)))
    ends = np.cumsum(sizes[document_idx], dtype=np.int64)
    first_tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    # a sample ends in the first document that has its last token, and the next begins `extra` before its end
    documents = np.searchsorted(ends, first_tokens + extra, side="left")
    beyond = documents == len(ends)
    documents[beyond] = len(ends) - 1
    offsets = first_tokens - np.concatenate([[0], ends[:-1]])[documents]
    offsets[beyond] = sizes[document_idx[-1]] - extra
    documents[0] = offsets[0] = 0  # even where the first document is empty
    return np.stack([documents, offsets], axis=1)


def build_sample_idx_int32(*args: object, **kwargs: object) -> NDArray[np.int32]:
    """Return what ``build_sample_idx_int64`` returns, in 32 bits."""
    return build_sample_idx_int64(*args, **kwargs).astype(np.int32)


def build_exhaustive_blending_indices(
    dataset_index: NDArray[np.int16], dataset_sample_index: Int64, sizes: Int64, num_datasets: int
) -> None:
    """Take every sample of every dataset once, each from the dataset that lags most behind its share.

    Args:
        dataset_index: ``[sum of sizes]``, is filled: the dataset of each sample.
        dataset_sample_index: ``[sum of sizes]``, is filled: its number in that dataset.
        sizes: ``[num_datasets]``, the samples to take from each.
    """
    total = int(sizes[:num_datasets].sum())
    shares = [int(size) / total for size in sizes[:num_datasets]]
    taken = [0] * num_datasets
    unspent = list(range(num_datasets))
    sample = 0
    while unspent:
        position = float(max(sample, 1))
        chosen = max(unspent, key=lambda dataset: shares[dataset] * position - taken[dataset])
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = taken[chosen]
        taken[chosen] += 1
        if taken[chosen] == sizes[chosen]:
            unspent.remove(chosen)
        sample += 1
