"""Implement ``--task seq2seq``, which generates a text from another text (such as a translation or a
summary).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_npu.base.arg_parser import positive
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.run import metrics
from megatron_npu.finetune.tasks.declaration import Flag
from megatron_npu.finetune.tasks.task import EXAMPLE, Batch, Task, inputs, label_losses, mean_loss

if TYPE_CHECKING:
    from transformers import DataCollatorForSeq2Seq


class Seq2Seq(Task):
    """Task that fine-tunes an ``AutoModelForSeq2SeqLM``.

    The columns are a source and a target; ``translation.en`` selects ``en`` in a column that contains both
    languages. The metrics, which require ``--predict-with-generate``, are exact match and ROUGE-L of the
    generated texts.
    """

    name = "seq2seq"
    head = "AutoModelForSeq2SeqLM"
    pipeline = "text2text-generation"
    roles: ClassVar = {
        "source": ("source", "input", "article", "document", "dialogue", "question", "text", "en"),
        "target": ("target", "output", "highlights", "summary", "answer", "label"),
    }
    flags = (
        Flag("--source-prefix", default="", metavar="TEXT", help="text to prepend to each source"),
        Flag("--max-target-length", type=positive, default=128, help="maximum number of tokens in an output"),
        Flag("--predict-with-generate", action="store_true", help="also generate outputs during evaluation"),
        Flag(
            "--num-beams",
            type=positive,
            default=1,
            help="number of beams for beam search when generating outputs",
        ),
    )

    @classmethod
    def check(cls, args: Namespace) -> None:
        """Reject --num-beams for runs that generate no texts."""
        if args.num_beams > 1 and not args.predict_with_generate:
            raise UsageError(
                "--num-beams requires --predict-with-generate, because beams are used only for generated "
                "outputs. Add --predict-with-generate, or remove --num-beams."
            )

    @functools.cached_property
    def parts(self) -> Parts:
        """The rows of each split.

        Nested columns are expanded if a flag refers to one.
        """
        parts = super().parts
        if any("." in name for _, name in self.args.columns):
            return parts.changed(lambda rows: rows.flatten())
        return parts

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the tokens of each source text, and the tokens of its target text as labels."""
        encode = functools.partial(
            _encode,
            tokenizer=self.tokenizer,
            columns=self.columns,
            prefix=self.args.source_prefix,
            longest=self.longest,
            longest_target=self.args.max_target_length,
        )
        return rows.map(encode, batched=True, remove_columns=rows.column_names, desc=f"tokenize {part}")

    @functools.cached_property
    def _padding(self) -> DataCollatorForSeq2Seq:
        from transformers import DataCollatorForSeq2Seq

        return DataCollatorForSeq2Seq(self.tokenizer, label_pad_token_id=IGNORED)

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch with padded source texts and target texts.

        The model creates the decoder's inputs from the labels.
        """
        numbers = [one[EXAMPLE] for one in examples if EXAMPLE in one]
        batch = self._padding([{k: v for k, v in one.items() if k != EXAMPLE} for one in examples])
        if numbers:
            batch[EXAMPLE] = torch.tensor(numbers)
        return batch

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        """Return the loss over the target tokens and, if texts are generated, the metrics of these texts."""
        rows = self.evaluated(model, eval_dataloader, self._read, self._outputs)
        found = {"loss": mean_loss(rows)}
        if self.args.predict_with_generate:
            found |= metrics.overlap(self._texts(rows["written"]), self._texts(rows["label"]))
        return found

    def _outputs(self, model: Any, batch: Batch) -> Any:
        outputs = model(**inputs(batch))
        if self.args.predict_with_generate:
            outputs["written"] = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.args.max_target_length,
                num_beams=self.args.num_beams,
                do_sample=False,
                # where weights are sharded, all ranks go through the model as often as the slowest
                synced_gpus=self.args.world_size > 1,
            )
        return outputs

    def _read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        losses, counted = label_losses(outputs.logits, batch["labels"])
        rows = {"loss": losses, "counted": counted}
        if "written" in outputs:
            rows |= {"written": outputs["written"], "label": batch["labels"]}
        return rows

    def _texts(self, rows: Any) -> list[str]:
        kept = [[token for token in row if token != IGNORED] for row in rows.tolist()]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)


def _encode(
    rows: Mapping[str, list[Any]],
    *,
    tokenizer: Any,
    columns: Mapping[str, str],
    prefix: str,
    longest: int,
    longest_target: int,
) -> dict[str, Any]:
    sources = [prefix + text for text in rows[columns["source"]]]
    tokens = tokenizer(sources, truncation=True, max_length=longest)
    of_targets = tokenizer(
        text_target=list(rows[columns["target"]]), truncation=True, max_length=longest_target
    )
    return {**tokens, "labels": of_targets["input_ids"]}
