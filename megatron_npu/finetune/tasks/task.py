"""Share code between tasks: loading of data and models, and evaluations that count each example once."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_npu.base.arg_parser import Number
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import unknown as unknown_tokens
from megatron_npu.devices.rows import Rows
from megatron_npu.finetune import tasks
from megatron_npu.finetune.data import columns, skipped_rows, texts, turns
from megatron_npu.finetune.data.datasets import load
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.model import pretrained
from megatron_npu.finetune.run.flag_parts import DataFlags, SkipFlags
from megatron_npu.finetune.tasks.declaration import Declaration, Flag

EXAMPLE = "example"  # the column that numbers the examples of an evaluation, through all parts

Batch = MutableMapping[str, Tensor]
_fraction = Number("a number from 0 to 0.9", float, 0.0, 0.9, metavar="X")


class Task(Declaration):
    """Methods of a ``Finetuner`` that do not depend on the task.

    A task defines how rows become examples (``encoded``), how examples become a batch (``collate``) and what
    is computed from the model's outputs (``run_compute_metrics``).

    Args:
        engine: the engine of this process.
    """

    head: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ("data_name", "columns", "skip_bad_rows")
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--validation-fraction",
            type=_fraction,
            default=0.1,
            help="fraction of the training split to use for validation if the data has no validation split",
        ),
    )

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.args = engine.args
        if self.args.rank:
            _be_quiet()
        elif not sys.stderr.isatty():
            _draw_no_bars()

    # -- what a task adds

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the encoded examples for the rows of a split."""
        raise NotImplementedError

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch of examples."""
        raise NotImplementedError

    def config_changes(self) -> dict[str, Any]:
        """Return the changes to the model's configuration that the data requires.

        A missing or invalid column is reported here, before the model is loaded.
        """
        self.require_columns()
        return {}

    def require_columns(self) -> None:
        """Check that the columns exist and contain text in every row.

        Raises:
            UsageError: a column is missing or has no text, or a row has no text.
        """
        texts.require(self.parts, self.columns)

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the options for loading the tokenizer."""
        return {}

    # -- what they share

    @functools.cached_property
    def parts(self) -> Parts:
        """The rows of each split.

        With --skip-bad-rows, rows without required values are omitted.
        """
        if not self.args.skip_bad_rows:
            return load(DataFlags.of(self.args))
        skipped = skipped_rows.Skipped(SkipFlags.of(self.args))
        found = load(DataFlags.of(self.args), skipped)
        names = {part: rows.column_names for part, rows in found.items()}
        skipped_rows.without_value(found, self.needed_columns(names), skipped)
        skipped.publish()
        return found

    def needed_columns(self, there: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of the columns that must have a value in every row of each split."""
        return sorted(set(columns.find(there, self.roles, self.args.columns).values()))

    @property
    def column_names(self) -> dict[str, list[str]]:
        """The names of the columns in each split."""
        return {part: rows.column_names for part, rows in self.parts.items()}

    @functools.cached_property
    def columns(self) -> dict[str, str]:
        """The name of the column for each role."""
        return columns.find(self.column_names, self.roles, self.args.columns)

    @functools.cached_property
    def config(self) -> Any:
        """The model's configuration."""
        found = pretrained.config(self.args.pretrained_model_name_or_path, **self.config_changes())
        self.require_fit(found)
        return found

    def require_fit(self, config: Any) -> None:
        """Check that the model has the head that the task trains.

        Raises:
            UsageError: the model does not support it.
        """
        if not pretrained.has_head(config, self.head):
            name = self.args.pretrained_model_name_or_path
            fitting = [
                task
                for task, kind in tasks.every().items()
                if kind.head is not None and pretrained.has_head(config, kind.head)
            ]
            raise UsageError(
                f"--task {self.name} does not support {name}, a {config.model_type}; the tasks for which "
                f"Transformers has a head for this model are: {', '.join(fitting) or 'none'}. Use another "
                "task or another model."
            )

    def own_labels(self) -> tuple[str, ...]:
        """Return the names of the model's classes.

        A model without a classification head has two unnamed classes.
        """
        return pretrained.class_names(self.args.pretrained_model_name_or_path)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return pretrained.tokenizer(
            self.args.pretrained_model_name_or_path, self.config, **self.tokenizer_options()
        )

    @functools.cached_property
    def longest(self) -> int:
        """The maximum number of tokens in an example."""
        name = self.args.pretrained_model_name_or_path
        return pretrained.longest(name, self.tokenizer, self.config, self.args.seq_length)

    @functools.cached_property
    def examples(self) -> dict[str, Any]:
        """The encoded examples of each split.

        Evaluation examples are numbered consecutively over the splits.
        """
        found, number = {}, 0
        with self._one_rank_first():
            encoded = {part: self.encoded(rows, part) for part, rows in self.parts.items()}
        self._warn_of_unknown_tokens(encoded["train"])
        for part, examples in encoded.items():
            numbers = list(range(number, number + len(examples)))
            found[part] = examples if part == "train" else examples.add_column(EXAMPLE, numbers)
            number += len(examples)
        return found

    def _warn_of_unknown_tokens(self, examples: Any) -> None:
        """Warn if most tokens of the first examples are unknown to the tokenizer, or if there are none."""
        if self.args.rank != 0:
            return
        rows = examples[: unknown_tokens.SAMPLES].get("input_ids", [])
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown == self.tokenizer.eos_token_id:  # GPT-2's is both, and stands for the end only
            unknown = None
        around = {*self.tokenizer.all_special_ids} - {unknown}
        tokens = [token for row in rows for token in row if token not in around]
        name = f"the tokenizer of {self.args.pretrained_model_name_or_path}"
        name += f" ({type(self.tokenizer).__name__})"
        told = unknown_tokens.warning(tokens.count(unknown), len(tokens), "the training data", name)
        if rows and not tokens:
            told = unknown_tokens.no_words("the training data", name)
        if told:
            print(f"megatron-npu train: {told}", file=sys.stderr, flush=True)

    def _one_rank_first(self) -> contextlib.AbstractContextManager[None]:
        """Let one rank tokenize the data into the cache of ``datasets`` before the other ranks read it."""
        import datasets

        args, kept = self.args, all(rows.cache_files for rows in self.parts.values())
        if args.world_size == 1 or not kept or not datasets.is_caching_enabled():
            return contextlib.nullcontext()
        facts = (args.data_path, args.data_name, self.name, args.pretrained_model_name_or_path)
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return turns.first_alone(Path(datasets.config.HF_DATASETS_CACHE) / f"tokenize-{name}.lock")

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Callable[..., Batch]]:
        """Return the examples of each split (None if a split is missing), and the collate function."""
        return self.examples["train"], self.examples["validation"], self.examples.get("test"), self.collate

    def model_optimizer_lr_scheduler_provider(self) -> tuple[torch.nn.Module, None, None]:
        """Return the model with the head that the task needs."""
        self.tokenizer  # may name a padding token in the configuration  # noqa: B018
        name = self.args.pretrained_model_name_or_path
        return pretrained.model(name, self.head, self.config), None, None

    def padded(
        self, examples: list[dict[str, Any]], numbers: tuple[str, ...] = (), rows: tuple[str, ...] = ()
    ) -> Batch:
        """Return a batch of tokens [b, s], padded to the length of the longest example.

        Args:
            examples: results of the tokenizer, with additional columns.
            numbers: columns with one number per example, [b].
            rows: columns with one number per token, [b, s], padded with -100.
        """
        from transformers.data.data_collator import pad_without_fast_tokenizer_warning

        numbers = (*numbers, EXAMPLE) if EXAMPLE in examples[0] else numbers
        own = [{k: v for k, v in one.items() if k not in (*numbers, *rows)} for one in examples]
        batch = pad_without_fast_tokenizer_warning(self.tokenizer, own, return_tensors="pt")
        width, left = batch["input_ids"].shape[1], self.tokenizer.padding_side == "left"
        for name in numbers:
            batch[name] = torch.tensor([one[name] for one in examples])
        for name in rows:
            batch[name] = torch.tensor([_filled(one[name], width, left) for one in examples])
        return batch

    def require_places(self) -> None:
        """Reject tokenizers that do not return the positions of tokens in the text.

        Raises:
            UsageError: the tokenizer is implemented in Python.
        """
        if not self.tokenizer.is_fast:
            raise UsageError(
                f"the tokenizer of {self.args.pretrained_model_name_or_path} is not a fast tokenizer, but "
                "this task requires one, because it returns the position of each token. Use a model with a "
                "tokenizer.json."
            )

    def run_forward_step(self, batch: Batch, model: torch.nn.Module) -> Tensor:
        """Return the loss of a batch as computed by the model, which is the mean over the batch's labels."""
        return model(**inputs(batch)).loss

    def evaluated(
        self,
        model: Sequence[torch.nn.Module],
        batches: Iterable[Batch],
        read: Callable[[Batch, Any], Mapping[str, Tensor]],
        forward: Callable[[torch.nn.Module, Batch], Any] | None = None,
    ) -> dict[str, np.ndarray]:
        """Return the values that ``read`` extracts from the model's outputs for the examples of all ranks.

        Each example occurs once and in order.

        If the examples cannot be divided evenly among the ranks, some examples are processed twice.

        Args:
            model: a list with the model.
            batches: batches of this rank.
            read: a function that creates rows from a batch and its outputs: tensors [b] or [b, n] by name,
                padded with -100 if n differs between batches.
            forward: a function that returns the outputs; by default, the model is called with the batch.
        """
        found: dict[str, Rows] = collections.defaultdict(lambda: Rows(IGNORED))
        for batch in batches:
            outputs = forward(model[0], batch) if forward else model[0](**inputs(batch))
            for name, rows in {EXAMPLE: batch[EXAMPLE], **read(batch, outputs)}.items():
                found[name].add(rows.cpu())
        together = {
            name: self.engine.gather(rows.all().to(self.engine.device)).cpu().numpy()
            for name, rows in found.items()
        }
        _, first = np.unique(together[EXAMPLE], return_index=True)
        return {name: rows[first] for name, rows in together.items()}


def _be_quiet() -> None:
    """Silence the libraries' progress bars and log messages on ranks other than 0."""
    import transformers

    _draw_no_bars()
    transformers.logging.set_verbosity_error()


def _draw_no_bars() -> None:
    """Disable the progress bars of libraries, because each update would be a separate line in a log file."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()


def inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the values in a batch that the model accepts as inputs."""
    return {name: value for name, value in batch.items() if name != EXAMPLE}


def label_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of each example, ``[b]``, and its number of labels.

    Args:
        logits: [b, n, classes].
        labels: [b, n], -100 for no label.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(labels).sum(1), (labels != IGNORED).sum(1)


def mean_loss(rows: Mapping[str, np.ndarray]) -> float:
    """Return the mean loss over all labels, given ``loss`` and ``counted`` from ``label_losses``."""
    return float(rows["loss"].astype(np.float64).sum() / max(rows["counted"].sum(), 1))


def _filled(row: list[int], width: int, left: bool) -> list[int]:
    rest = [IGNORED] * (width - len(row))
    return rest + row if left else row + rest
