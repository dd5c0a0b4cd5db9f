"""``megatron.data``: index files of datasets, built without a compiler and read without pickle."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import records
from megatron_npu.adaptors.shared import data

data.connect(
    records,
    ("gpt_dataset", "dataset_utils", "biencoder_dataset_utils", "realm_dataset_utils"),
    until="285068c8 is frozen: for ever (0.16 still passes allow_pickle=True)",
)
