"""Patch ``tasks/zeroshot_gpt`` to truncate long passages and to count each example once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.base.errors import UsageError

KEEPS_NO_END = (
    "a passage with more tokens than --seq-length is not truncated, and its batch raises an "
    "IndexError or a RuntimeError"
)
COUNTS_TWICE = (
    "if the examples cannot be divided evenly among data-parallel ranks, the sampler repeats "
    "some, and the results count them twice"
)


def keep_the_end(original: Callable[[], Any]) -> Any:
    """Build the passages of LAMBADA, keeping only the last tokens of passages that are too long.

    Print how many were truncated.
    """
    dataset = original()
    longer = 0
    for tokens, answer in zip(dataset.tokens, dataset.labels, strict=True):
        surplus = len(tokens) + len(answer) - 1 - dataset.seq_len
        if surplus >= max(len(tokens), 1):
            raise UsageError(
                f"a passage's last word has {len(answer)} tokens, which is too long for --seq-length "
                f"{dataset.seq_len}: there must be enough positions for the word and at least one token "
                "before it. Use a model with more positions."
            )
        if surplus > 0:
            del tokens[:surplus]
            longer += 1
    if longer and torch.distributed.get_rank() == 0:
        print(
            f" > {longer} passages are longer than {dataset.seq_len} tokens; only their last "
            f"{dataset.seq_len} tokens are used"
        )
    return dataset


def count_each_once(original: Callable[..., Any], data_loader: Any, model: Any, eval_metric: str) -> Any:
    """Run the evaluation without counting examples that the sampler repeats."""
    return original(_without_repeated(data_loader, eval_metric), model, eval_metric)


def _without_repeated(data_loader: Any, eval_metric: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches with repeated examples removed.

    All ranks get the same number of batches, because upstream adds up results batch by batch.

    A batch has ``text`` [b, s + 1] and ``pad_mask`` [b, s], int64, which marks the tokens to predict.
    """
    sampler, examples = data_loader.sampler, len(data_loader.dataset)
    begin = 0
    for batch in data_loader:
        rows = torch.arange(begin, begin + len(batch["text"]))
        begin += len(rows)
        repeated = sampler.rank + sampler.num_replicas * rows >= examples  # they come last
        if eval_metric == "accuracy":
            batch["text"][repeated, -1] = -1  # is asked for, not read: a token that no model gives
            batch["pad_mask"][repeated, -1] = 1
        else:
            batch["pad_mask"][repeated] = 0
        yield batch
