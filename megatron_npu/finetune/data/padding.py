"""Pad batches to a small number of different lengths, so that few graphs need to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.labels import IGNORED

Collate = Callable[[list[Any]], Any]
# What is put behind (or in front of) each row, by the names that Transformers' models know; others get 0.
FILLERS = {"labels": IGNORED, "special_tokens_mask": 1}
LONGEST = 512  # tokens of the last bucket, where --seq-length says nothing; longer batches stay as they are
_GROWTH = 1.25  # from bucket to bucket: a ninth of padding on average, and 20 buckets up to 4,096 tokens


def buckets(longest: int, multiple: int = 8) -> list[int]:
    """Return the lengths to which batches are padded, up to ``longest`` tokens.

    Each length is a quarter longer than the previous one.

    Raises:
        UsageError: ``longest`` is not positive.
    """
    if longest < 1:
        raise UsageError(
            f"the longest text must have at least 1 token, but it has {longest}. Pass --seq-length."
        )
    lengths, length = [], 2 * multiple
    while length < longest:
        lengths.append(length)
        length = -(-int(length * _GROWTH + 1) // multiple) * multiple
    return [*lengths, longest]


@dataclass
class Bucketed:
    """A collate function that pads batches to a small number of different lengths.

    Attributes:
        collate_fn: the function that creates a batch, a mapping of tensors ``[b, s, ...]`` whose
            ``input_ids`` determine s.
        lengths: the lengths in ascending order. Longer batches and batches without ``input_ids`` are not
            changed.
        pad_token_id: padding value of ``input_ids``.
        left: whether to pad on the left, as generation requires.
        seen: number of batches of each length so far.
    """

    collate_fn: Collate
    lengths: Sequence[int]
    pad_token_id: int = 0
    left: bool = False
    seen: dict[int, int] = field(default_factory=dict)

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of the given samples, padded to the next larger of the allowed lengths."""
        batch = self.collate_fn(samples)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            return batch
        now = ids.size(1)
        length = next((bucket for bucket in self.lengths if bucket >= now), now)
        self.seen[length] = self.seen.get(length, 0) + 1
        if length == now:
            return batch
        if "attention_mask" not in batch:  # what is filled in must not be looked at
            batch["attention_mask"] = torch.ones_like(ids)  # type: ignore[index]
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.dim() > 1 and value.size(1) == now:
                batch[name] = self._padded(name, value, length - now)  # type: ignore[index]
        return batch

    def _padded(self, name: str, value: Tensor, more: int) -> Tensor:
        filler = self.pad_token_id if name == "input_ids" else FILLERS.get(name, 0)
        sides = (more, 0) if self.left else (0, more)
        return F.pad(value, (0, 0) * (value.dim() - 2) + sides, value=filler)


def bucketed(
    collate_fn: Collate, lengths: Sequence[int], *, pad_token_id: int = 0, left: bool = False
) -> Bucketed:
    """Wrap ``collate_fn`` so that it pads each batch to the next larger of ``lengths``.

    Args:
        collate_fn: see ``Bucketed.collate_fn``.
        lengths: the lengths in tokens, as returned by ``buckets``.
        pad_token_id: padding value of ``input_ids``; masks are padded with 0, and labels with -100.
        left: whether to pad on the left.

    Raises:
        UsageError: there are no lengths, or one is not positive.
    """
    if not lengths or min(lengths) < 1:
        raise UsageError(
            f"the padded lengths must be positive numbers of tokens, but got {list(lengths)}. Use the "
            "lengths returned by buckets()."
        )
    return Bucketed(collate_fn, sorted(lengths), pad_token_id, left)
