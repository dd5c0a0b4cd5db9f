"""Implement ``--task sequence_classification``, which predicts a class or a number for a text."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import columns, labels, texts
from megatron_npu.finetune.data.datasets import named
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.run import metrics
from megatron_npu.finetune.run.flag_parts import DataFlags
from megatron_npu.finetune.tasks.task import Batch, Task

# a text with the one that it is compared with: of GLUE, and of data sets like it
_PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
)


class SequenceClassification(Task):
    """Task that fine-tunes an ``AutoModelForSequenceClassification``.

    The columns are a text, optionally a second text, and a label, which is a class number, a class name, or a
    number to predict. The metrics are accuracy, F1 and Matthews' correlation; for regression, Pearson's and
    Spearman's correlation; and for GLUE tasks, the metrics of GLUE.
    """

    name = "sequence_classification"
    head = "AutoModelForSequenceClassification"
    pipeline = "text-classification"
    roles: ClassVar = {
        "text": ("sentence", "text", "review", "content", "body", "title", "question", "comment"),
        "pair": (),
        "label": ("label", "labels", "target", "class", "category", "sentiment", "score"),
    }

    @functools.cached_property
    def parts(self) -> Parts:
        """The rows of each split.

        A test split with hidden labels is omitted.
        """
        parts = super().parts
        test = parts.get("test")
        if test is not None and self._column in test.column_names and labels.are_hidden(test, self._column):
            del parts["test"]
        return parts

    @functools.cached_property
    def labels(self) -> labels.Labels:
        """The labels that occur in the data."""
        return labels.of_rows(self.parts, self._column, self.own_labels())

    @functools.cached_property
    def _column(self) -> str:
        there = {"train": super().parts["train"].column_names}
        said = [pair for pair in self.args.columns if pair[0] == "label"]
        return columns.find(there, {"label": self.roles["label"]}, said)["label"]

    @functools.cached_property
    def _texts(self) -> tuple[str, str | None]:
        return columns_of_texts(self.column_names, self._column, self.args.columns)

    def config_changes(self) -> dict[str, Any]:
        """Return the label settings that the model's configuration needs."""
        self.require_columns()  # told before labels are looked at
        return self.labels.config()

    def require_columns(self) -> None:
        """Check that every row has a text, and a second text if there is a column for second texts."""
        texts.require(self.parts, dict(zip(("text", "pair"), self._texts, strict=True)))

    def needed_columns(self, there: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of the columns for the label, the text and the second text."""
        said = [pair for pair in self.args.columns if pair[0] == "label"]
        label = columns.find({"train": there["train"]}, {"label": self.roles["label"]}, said)["label"]
        both = columns_of_texts(there, label, self.args.columns)
        return [label, *(column for column in both if column is not None)]

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the tokens and the label of each text or text pair."""
        encode = functools.partial(
            _encode,
            tokenizer=self.tokenizer,
            text=self._texts[0],
            pair=self._texts[1],
            label=self._column,
            number=self.labels.number,
            longest=self.longest,
        )
        return rows.map(encode, batched=True, remove_columns=rows.column_names, desc=f"tokenize {part}")

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch padded to the length of its longest example."""
        kind = torch.float32 if self.labels.regression else torch.int64
        batch = self.padded(examples, numbers=("labels",))
        batch["labels"] = batch["labels"].to(kind)
        return batch

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        """Return the loss over the examples, and the metrics."""
        rows = self.evaluated(model, eval_dataloader, self._read)
        loss = float(rows["loss"].mean(dtype="float64"))
        if self.labels.regression:
            return {"loss": loss, **metrics.regression(rows["prediction"], rows["label"])}
        name, task = named(DataFlags.of(self.args))
        glue = task if name.rpartition("/")[2] == "glue" else None
        return {"loss": loss, **self._of_classes(rows, glue)}

    def _of_classes(self, rows: Mapping[str, np.ndarray], glue: str | None) -> dict[str, float]:
        classes = len(self.labels.names)
        return metrics.classification(rows["prediction"], rows["label"], glue, classes=classes)

    def _read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        logits, true = outputs.logits.float(), batch["labels"]
        if self.labels.regression:
            prediction = logits[:, 0]
            return {"prediction": prediction, "label": true, "loss": (prediction - true) ** 2}
        losses = torch.nn.functional.cross_entropy(logits, true, reduction="none")
        return {"prediction": logits.argmax(-1), "label": true, "loss": losses}


def columns_of_texts(
    there: Mapping[str, Collection[str]], label: str, said: Collection[tuple[str, str]]
) -> tuple[str, str | None]:
    """Return the names of two columns: that of the texts to classify, and that of the second texts or None.

    Args:
        there: the columns of each split.
        label: the column of the label.
        said: roles and names from ``--columns``.

    Raises:
        UsageError: see ``columns.find``; or one column is both text and label, or a pair is given without
            text.
    """
    said = [pair for pair in said if pair[0] != "label"]
    given = dict(said)
    if "pair" in given and "text" not in given:
        raise UsageError("--columns pair=… requires text=… as well. Also name the column of the first text.")
    both = next((two for two in _PAIRS if {*two} <= {*there["train"]} and label not in two), None)
    if both is not None and not given:
        said = list(zip(("text", "pair"), both, strict=True))
    usual = [name for name in SequenceClassification.roles["text"] if name != label]
    found = columns.find(there, {"text": usual, "pair": ()}, said)
    if label in found.values():
        raise UsageError(
            f"the column {label!r} is used both as the text and as its label, but they must be separate "
            "columns. Correct --columns."
        )
    return found["text"], found.get("pair")


def _encode(
    rows: Mapping[str, list[Any]],
    *,
    tokenizer: Any,
    text: str,
    pair: str | None,
    label: str,
    number: Any,
    longest: int,
) -> dict[str, Any]:
    pairs = (rows[pair],) if pair else ()
    tokens = tokenizer(rows[text], *pairs, truncation=True, max_length=longest)
    return {**tokens, "labels": [number(one) for one in rows[label]]}
