"""``megatron.data``: index files of datasets, built without a compiler and read without pickle."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import records
from megatron_npu.adaptors.shared import data

data.connect(
    records,
    (
        "gpt_dataset",
        "dataset_utils",
        "biencoder_dataset_utils",
        "realm_dataset_utils",
        "decoder_packed_mtf_dataset",
    ),
    until="8387ae17 is its last commit: for ever",
)
