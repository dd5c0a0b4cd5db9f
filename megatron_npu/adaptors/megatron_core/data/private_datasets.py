"""Patches for ``megatron.core.datasets``: make the dataset files that a stock tool writes private."""

from megatron_npu.adaptors.megatron_core.decorators import records
from megatron_npu.adaptors.shared import private_files

private_files.keep_datasets(records, "megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
