"""Concatenate texts and split them into blocks of equal length, which are the samples of language models."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import texts
from megatron_npu.finetune.run import metrics
from megatron_npu.finetune.tasks.declaration import Flag
from megatron_npu.finetune.tasks.task import Batch, Task, mean_loss

_TEXTS = 10_000  # that are put together at a time; what is left at the end of them is left out


class BlocksOfText(Task):
    """Base class of the two language-model tasks."""

    roles: ClassVar = {"text": ("text", "content", "sentence", "document", "body")}
    flags = (
        Flag(
            "--append-eod",
            action="store_true",
            help="append the end-of-text token to each text of a language-modeling dataset",
        ),
    )
    marked = False  # whether special tokens are put around each text, and a mask says where they are

    def require_columns(self) -> None:
        """Check that the text column contains text.

        Rows without text are permitted and ignored.
        """
        texts.require(self.parts, self.columns, every=False)

    def needed_columns(self, there: Mapping[str, Sequence[str]]) -> list[str]:
        """Return an empty list, because rows without text are permitted."""
        return []

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the text blocks of a split.

        Raises:
            UsageError: the texts do not fill a block.
        """
        encode = functools.partial(
            _encode,
            tokenizer=self.tokenizer,
            column=self.columns["text"],
            marked=self.marked,
            end=self.args.append_eod,
        )
        tokens = rows.map(encode, batched=True, remove_columns=rows.column_names, desc=f"tokenize {part}")
        cut = functools.partial(_cut, length=self.longest)
        blocks = tokens.map(cut, batched=True, batch_size=_TEXTS, desc=f"cut {part}")
        if not len(blocks):
            count = sum(map(len, tokens["input_ids"]))
            raise UsageError(
                f"the split {part!r} must have at least {self.longest} tokens, enough for one block, but it "
                f"has {count}. Provide more text, or a smaller --seq-length."
            )
        return blocks

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        """Return the loss over the predicted tokens, and the perplexity."""
        loss = mean_loss(self.evaluated(model, eval_dataloader, self.read))
        return {"loss": loss, "perplexity": metrics.perplexity(loss)}

    def read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        """Return the summed loss of each example (``loss``) and its number of labels (``counted``)."""
        raise NotImplementedError


def stacked(examples: list[dict[str, Any]], name: str) -> Tensor:
    """Return a column of examples of equal length as a tensor ``[b, n]``."""
    return torch.tensor([one[name] for one in examples])


def _encode(
    rows: Mapping[str, list[Any]], *, tokenizer: Any, column: str, marked: bool, end: bool
) -> dict[str, Any]:
    given = [text or "" for text in rows[column]]
    tokens = dict(tokenizer(given, return_attention_mask=False, return_special_tokens_mask=marked))
    tokens.pop("token_type_ids", None)
    if end:
        for own in tokens["input_ids"]:
            own.append(tokenizer.eos_token_id)
        for own in tokens.get("special_tokens_mask", ()):
            own.append(1)
    return tokens


def _cut(rows: Mapping[str, list[list[int]]], *, length: int) -> dict[str, list[list[int]]]:
    together = {name: [token for own in column for token in own] for name, column in rows.items()}
    return {
        name: [tokens[first : first + length] for first in range(0, len(tokens) - length + 1, length)]
        for name, tokens in together.items()
    }
