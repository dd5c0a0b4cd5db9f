"""``tasks/zeroshot_gpt``: truncate long passages, and count each example once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.base.errors import UsageError

KEEPS_NO_END = (
    "a passage with more tokens than --seq-length is not cut, and its batch ends with an IndexError or a "
    "RuntimeError"
)
COUNTS_TWICE = (
    "where data-parallel ranks cannot share the examples out evenly, the sampler repeats some, and the "
    "figures count them again"
)


def keep_the_end(original: Callable[[], Any]) -> Any:
    """Build LAMBADA's passages; keep the last tokens of those that are too long, and print how many."""
    dataset = original()
    longer = 0
    for tokens, answer in zip(dataset.tokens, dataset.labels, strict=True):
        surplus = len(tokens) + len(answer) - 1 - dataset.seq_len
        if surplus >= max(len(tokens), 1):
            raise UsageError(
                f"a passage whose last word has {len(answer)} tokens, with --seq-length {dataset.seq_len}",
                "enough positions for the word and a token before it",
                "Use a model with more positions.",
            )
        if surplus > 0:
            del tokens[:surplus]
            longer += 1
    if longer and torch.distributed.get_rank() == 0:
        print(
            f" > {longer} passages are longer than {dataset.seq_len} tokens and are truncated "
            "to their last tokens"
        )
    return dataset


def count_each_once(original: Callable[..., Any], data_loader: Any, model: Any, eval_metric: str) -> Any:
    """Evaluate, with the examples that the sampler repeats marked so that they never count."""
    return original(_without_repeated(data_loader, eval_metric), model, eval_metric)


def _without_repeated(data_loader: Any, eval_metric: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches; each rank has equally many, because upstream adds up their results one by one.

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
