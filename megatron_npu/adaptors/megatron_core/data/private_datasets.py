"""Patch ``megatron.core.datasets`` so that only the user and group can read dataset files written by
stock tools.
"""

from megatron_npu.adaptors.megatron_core.decorators import records
from megatron_npu.adaptors.shared import private_files

private_files.keep_datasets(records, "megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
