"""``megatron.data``: index files of datasets, built without a compiler and read without pickle."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, records
from megatron_npu.adaptors.shared import data

data.connect(
    records,
    ("gpt_dataset", "dataset_utils", "blendable_dataset", "biencoder_dataset_utils", "realm_dataset_utils"),
    until=UNTIL,
)
