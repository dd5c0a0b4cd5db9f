"""Implement ``--task token_classification``, which predicts a tag for each word."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from megatron_npu.finetune.data import labels, texts
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.run import metrics
from megatron_npu.finetune.tasks.task import Batch, Task, label_losses, mean_loss


class TokenClassification(Task):
    """Task that fine-tunes an ``AutoModelForTokenClassification``.

    The columns are a list of words and a list of tags, such as the kinds of names in a text; tags are numbers
    or names. The first token of a word carries the word's tag, and its other tokens have no tag. The metrics
    are the accuracy over words and, for entities, precision, recall and F1 if the tags look like ``B-PER``,
    ``I-PER``, ``O``.
    """

    name = "token_classification"
    head = "AutoModelForTokenClassification"
    pipeline = "token-classification"
    roles: ClassVar = {
        "tokens": ("tokens", "words"),
        "tags": ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags"),
    }

    @functools.cached_property
    def labels(self) -> labels.Labels:
        """The tags that occur in the data."""
        return labels.of_tokens(self.parts, self.columns["tags"], self.own_labels())

    def config_changes(self) -> dict[str, Any]:
        """Return the tag settings for the model's configuration."""
        self.require_columns()
        return self.labels.config()

    def require_columns(self) -> None:
        """Check that every row has a list of words and a list with the same number of tags."""
        labels.require_lists(self.parts["train"], self.columns["tags"])
        texts.require_words(self.parts, self.columns["tokens"], self.columns["tags"])

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the tokenizer options that byte-level tokenizers need for text that is already split
        into words.
        """
        return {"add_prefix_space": True}

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the tokens of each row with their labels.

        The first token of a word has the word's tag.
        """
        self.require_places()
        encode = functools.partial(
            _encode, tokenizer=self.tokenizer, columns=self.columns, labels=self.labels, longest=self.longest
        )
        return rows.map(encode, batched=True, remove_columns=rows.column_names, desc=f"tokenize {part}")

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch padded to the length of its longest example."""
        return self.padded(examples, rows=("labels",))

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        """Return the loss over the words, and the metrics."""
        rows = self.evaluated(model, eval_dataloader, _read)
        there = rows["label"] != IGNORED
        tags = np.array(self.labels.names)
        guessed, true = (
            [list(tags[own[kept]]) for own, kept in zip(rows[name], there, strict=True)]
            for name in ("prediction", "label")
        )
        return {"loss": mean_loss(rows), **metrics.tagging(guessed, true)}


def _read(batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
    losses, counted = label_losses(outputs.logits, batch["labels"])
    return {
        "prediction": outputs.logits.argmax(-1),
        "label": batch["labels"],
        "loss": losses,
        "counted": counted,
    }


def _encode(
    rows: Mapping[str, list[Any]],
    *,
    tokenizer: Any,
    columns: Mapping[str, str],
    labels: labels.Labels,
    longest: int,
) -> dict[str, Any]:
    words, tags = rows[columns["tokens"]], rows[columns["tags"]]
    tokens = tokenizer(words, is_split_into_words=True, truncation=True, max_length=longest)
    return {
        **tokens,
        "labels": [_at_first(tokens.word_ids(row), own, labels) for row, own in enumerate(tags)],
    }


def _at_first(words: list[int | None], tags: list[Any], labels: labels.Labels) -> list[int]:
    """Return one label per token, given the word that each token belongs to.

    The first token of a word has the word's label, and others have none.
    """
    return [
        IGNORED if word is None or word == before else int(labels.number(tags[word]))
        for before, word in zip([None, *words], words, strict=False)
    ]
