"""Implement ``--task causal_lm``, which predicts the next token."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model import pretrained
from megatron_npu.finetune.tasks.blocks_of_text import BlocksOfText, stacked
from megatron_npu.finetune.tasks.task import EXAMPLE, Batch, label_losses


class CausalLM(BlocksOfText):
    """Task that fine-tunes an ``AutoModelForCausalLM``.

    The data has one column, which contains the texts. Texts are concatenated and split into blocks of
    ``--seq-length`` tokens. The metric is the perplexity.
    """

    name = "causal_lm"
    head = "AutoModelForCausalLM"
    pipeline = "text-generation"

    @classmethod
    def check(cls, args: Namespace) -> None:
        """Reject text blocks that consist of a single token."""
        if args.seq_length == 1:
            raise UsageError(
                "--seq-length must be at least 2, for a token and the next one, but got 1. Pass a larger "
                "--seq-length."
            )

    def require_fit(self, config: Any) -> None:
        """Reject encoder models, in addition to the checks of the base class."""
        super().require_fit(config)
        if pretrained.sees_all(config):
            name = self.args.pretrained_model_name_or_path
            raise UsageError(
                f"--task {self.name} requires a decoder-only model, but {name} is a {config.model_type}, "
                "whose attention sees the tokens that it should predict. Pass --task masked_lm, or a model "
                "such as GPT-2."
            )

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch of blocks ``[b, s]``, which are also the labels.

        The model shifts the labels.
        """
        tokens = stacked(examples, "input_ids")
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if EXAMPLE in examples[0]:
            batch[EXAMPLE] = stacked(examples, EXAMPLE)
        return batch

    def read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        """Return the loss over all tokens of a block except the first."""
        losses, counted = label_losses(outputs.logits[:, :-1], batch["labels"][:, 1:])
        return {"loss": losses, "counted": counted}
