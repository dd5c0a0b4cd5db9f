"""``megatron.core.datasets``: the files of a dataset that a stock tool writes are private."""

from megatron_npu.adaptors.megatron_core.decorators import records
from megatron_npu.adaptors.shared import private_files

private_files.keep_datasets(records, "megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
