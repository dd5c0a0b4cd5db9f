"""Provide validation samples from one or more sets, either successive samples or whole sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.data.datasets import Datasets
from megatron_npu.pretrain.flags.plan_parts import EvaluationFlags


@dataclass(frozen=True)
class ValidationSet:
    """A validation set, for which a separate loss is computed.

    Attributes:
        name: its prefix if there are several sets; otherwise empty.
        dataset: its samples.
        batches: the number of global batches per validation.
        is_whole: whether each validation reads the whole set; otherwise, a validation continues where the
            previous one ended.
    """

    name: str
    dataset: Dataset
    batches: int
    is_whole: bool


def sets(flags: EvaluationFlags, datasets: Datasets) -> list[ValidationSet]:
    """Return the sets that each validation reads, or an empty list if there is no validation.

    Raises:
        UsageError: a set that is to be read completely has no samples.
    """
    found = list(datasets.valid_sets)
    if datasets.valid is not None:
        found = [("", datasets.valid)]
    if not flags.full_validation:
        return [
            ValidationSet(name, each, flags.eval_iters, False) for name, each in found if flags.eval_iters
        ]
    return [_whole(flags, name, each) for name, each in found]


def _whole(flags: EvaluationFlags, name: str, dataset: Any) -> ValidationSet:
    if not len(dataset):
        raise UsageError(
            f"--full-validation requires at least one sample, but {name or 'the validation data'} has "
            f"fewer than {flags.seq_length + 1} tokens",
            remedy="Provide more data, or remove the flag.",
        )
    padded = Padded(dataset, flags.global_batch_size)
    return ValidationSet(name, padded, len(padded) // flags.global_batch_size, True)


class Padded(Dataset):
    """Dataset with additional samples that are not counted, so that its last global batch is complete.

    Args:
        dataset: a dataset whose samples have a ``loss_mask``.
        multiple: the length is padded to a multiple of this number.
    """

    def __init__(self, dataset: Any, multiple: int) -> None:
        self._dataset, self._length = dataset, -(-len(dataset) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number < len(self._dataset):
            return self._dataset[number]
        sample = dict(self._dataset[0])
        return {**sample, "loss_mask": torch.zeros_like(torch.as_tensor(sample["loss_mask"]))}
