"""Patch ``megatron.core.datasets`` so that dataset files written by stock tools are private."""

from megatron_npu.adaptors.megatron_core.decorators import records
from megatron_npu.adaptors.shared import private_files

private_files.keep_datasets(records, "megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
