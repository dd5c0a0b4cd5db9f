"""Stub for ``megatron.core.datasets.helpers_cpp``, megatron-core's C++ extension for dataset indices.

A wheel contains the compiled extension. In a checkout, upstream runs make when training starts, for the first
python3-config on the path. Names and formats are those of ``megatron/core/datasets/helpers.cpp`` in 0.16.1;
the functions shared with Megatron-LM 285068c8 come from the stub for that upstream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_npu.standins.datasets import compiled_dataset_indices as compiled
from megatron_npu.standins.datasets.dataset_helpers import (
    Int64,
    build_blending_indices,
    build_blocks_mapping,
    build_mapping,
    build_sample_idx_int64,
)

__all__ = [
    "build_blending_indices",
    "build_blocks_mapping",
    "build_exhaustive_blending_indices",
    "build_mapping",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]


def build_sample_idx_int32(*args: Any, **kwargs: Any) -> NDArray[np.int32]:
    """Return the result of ``build_sample_idx_int64`` with dtype int32."""
    return build_sample_idx_int64(*args, **kwargs).astype(np.int32)


def build_exhaustive_blending_indices(
    dataset_index: NDArray[np.int16], dataset_sample_index: Int64, sizes: Int64 | list[int], num_datasets: int
) -> None:
    """Fill the index arrays so that all samples of every dataset are used once.

    The next sample comes from the dataset that is furthest behind its share.

    Args:
        dataset_index: ``[sum of sizes]``, filled with the dataset of each sample.
        dataset_sample_index: ``[sum of sizes]``, filled with the sample's index in that dataset.
        sizes: ``[num_datasets]``, the number of samples to take from each dataset; a list is accepted too, as
            by the extension.
    """
    counts = [int(size) for size in sizes[:num_datasets]]
    total = sum(counts)
    if compiled.blends(dataset_index, dataset_sample_index, num_datasets, total):
        limits = np.array(counts, np.int64)
        compiled.blend(dataset_index, dataset_sample_index, limits / total, total, limits)
        return
    shares = [count / total for count in counts]
    taken = [0] * num_datasets
    unspent = [dataset for dataset, count in enumerate(counts) if count]
    sample = 0
    while unspent:
        position = float(max(sample, 1))
        chosen = max(unspent, key=lambda dataset: shares[dataset] * position - taken[dataset])
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = taken[chosen]
        taken[chosen] += 1
        if taken[chosen] == counts[chosen]:
            unspent.remove(chosen)
        sample += 1
