"""Pad batches of tokenized samples without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_npu.finetune.data.padding import FILLERS

_IDS, _MASK = "input_ids", "attention_mask"


def pad(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad samples of different lengths to a batch with the field names that ``DataCollatorWithPadding`` uses.

    Values that are as long as a sample's ``input_ids`` are padded: tokens with 0, which is excluded by the
    batch's ``attention_mask``, and labels with -100. ``label`` and ``label_ids`` become ``labels``.

    Args:
        samples: mappings with ``input_ids`` whose values are lists, tensors or numbers.
    """
    lengths = [len(sample[_IDS]) for sample in samples]
    names = {"label": "labels", "label_ids": "labels"}
    batch = {
        names.get(name, name): _column(names.get(name, name), [sample[name] for sample in samples], lengths)
        for name in samples[0]
    }
    if _MASK not in batch:
        batch[_MASK] = _column(_MASK, [[1] * length for length in lengths], lengths)
    return batch


def _column(name: str, values: list[Any], lengths: list[int]) -> torch.Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    of_tokens = all(
        value.dim() and len(value) == length for value, length in zip(tensors, lengths, strict=True)
    )
    if not of_tokens:
        return torch.stack(tensors)
    filler = FILLERS.get(name, 0)
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)
