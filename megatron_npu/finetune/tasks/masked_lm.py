"""Implement ``--task masked_lm``, which predicts masked tokens."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.data.loading import sample_seeds
from megatron_npu.finetune.tasks.blocks_of_text import BlocksOfText, stacked
from megatron_npu.finetune.tasks.task import EXAMPLE, Batch, label_losses

if TYPE_CHECKING:
    from transformers import DataCollatorForLanguageModeling

_DRAWS = 1000  # until a block asks for a token; one of special tokens alone does not


class MaskedLM(BlocksOfText):
    """Task that fine-tunes an ``AutoModelForMaskedLM``.

    The data has one column, which contains the texts. Texts are surrounded by special tokens, concatenated
    and split into blocks of ``--seq-length`` tokens; a fraction ``--mask-prob`` of the tokens is predicted,
    as in BERT's training. The metric is the perplexity of the predicted tokens.
    """

    name = "masked_lm"
    head = "AutoModelForMaskedLM"
    pipeline = "fill-mask"
    reads = ("mask_prob",)
    marked = True

    @classmethod
    def check(cls, args: Namespace) -> None:
        """Reject a mask probability of 0."""
        if not args.mask_prob:
            raise UsageError(
                "--mask-prob must be positive, so that some tokens are masked, but got 0. Pass, for "
                "example, 0.15."
            )

    @functools.cached_property
    def _masking(self) -> DataCollatorForLanguageModeling:
        from transformers import DataCollatorForLanguageModeling

        if self.tokenizer.mask_token is None:
            raise UsageError(
                "--task masked_lm requires a model whose tokenizer has a mask token, but "
                f"{self.args.pretrained_model_name_or_path} has none. Pass --task causal_lm, or a model "
                "such as BERT."
            )
        return DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.args.mask_prob)

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch of masked blocks ``[b, s]`` with their labels.

        Evaluation examples are always masked at the same positions.

        Training examples are masked differently each time. The masks are drawn from the loader's seeds, so a
        resumed run and a run with a different micro-batch size use the same masks.
        """
        tokens, special = (stacked(examples, name) for name in ("input_ids", "special_tokens_mask"))
        numbered = EXAMPLE in examples[0]
        if numbered:
            seeds = [self.args.seed + one[EXAMPLE] for one in examples]
        else:
            seeds = sample_seeds(len(examples))
        rows = [
            self._masked(own, at, seed, draws=1 if numbered else _DRAWS)
            for own, at, seed in zip(tokens.split(1), special.split(1), seeds, strict=True)
        ]
        batch = self._batch(*map(torch.cat, zip(*rows, strict=True)))
        if numbered:
            batch[EXAMPLE] = stacked(examples, EXAMPLE)
        return batch

    def read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        """Return the loss over the masked tokens."""
        losses, counted = label_losses(outputs.logits, batch["labels"])
        return {"loss": losses, "counted": counted}

    def _masked(self, tokens: Tensor, special: Tensor, seed: int, draws: int) -> tuple[Tensor, Tensor]:
        """Mask some tokens of a block, and return the tokens ``[1, s]`` and the labels ``[1, s]``.

        If no token was masked, masking is repeated, up to ``draws`` times.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for _ in range(draws):
                masked, labels = self._masking.torch_mask_tokens(tokens.clone(), special)
                if (labels != IGNORED).any():
                    break
        return masked, labels

    @staticmethod
    def _batch(tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
