"""Templates to subclass, by users and by every task of this project: ``Finetuner`` and ``PreTrainer``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import labels, vocabulary
from megatron_npu.finetune.data.loading import Collate, Loader, require_length
from megatron_npu.finetune.model import pair_losses
from megatron_npu.finetune.rapidformer import megatron_models, providers
from megatron_npu.finetune.rapidformer.engine import RapidformerEngine
from megatron_npu.finetune.run import label_shares, layout, loop
from megatron_npu.finetune.run.outcome import Evaluation, Outcome
from megatron_npu.finetune.run.run_plan import RunPlan


class Template:
    """What both templates have.

    Args:
        engine: of this process.
    """

    def __init__(self, engine: RapidformerEngine) -> None:
        self.engine = engine

    def train_valid_test_datasets_provider(self, *args: Any) -> Any:
        """Return the data; see the two templates."""
        raise providers.missing(self, "train_valid_test_datasets_provider", "data sets")

    def model_optimizer_lr_scheduler_provider(self) -> tuple[nn.Module, Any, Any]:
        """Return model, optimizer and scheduler.

        The last two are objects, functions that make them (of parameters, of an optimizer), or None: fused
        AdamW and the schedule of the flags.
        """
        raise providers.missing(
            self, "model_optimizer_lr_scheduler_provider", "model, optimizer, lr_scheduler"
        )

    def run_forward_step(
        self, batch_or_iterator: Any, model: nn.Module
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the loss of a micro-batch, a tensor of one number: the mean over its labels.

        Args:
            batch_or_iterator: a batch on the device (``Finetuner``), what gives such (``PreTrainer``).
            model: called as what ``model_optimizer_lr_scheduler_provider`` has returned.
        """
        raise providers.missing(self, "run_forward_step", "the loss")

    def label_counts(self, batch: Any) -> int | tuple[int, ...]:
        """Return over how many labels the loss of a batch is the mean, which says how much it counts.

        By default: the ``labels`` that are not -100, of whole numbers; of a causal model of Transformers all
        but the first of a text; one a sample where there are none. Of a model with a head for the next
        sentence, whose loss is the sum of two means, a tuple: these, and the pairs. Where
        ``run_forward_step`` returns several losses in a tuple, whose sum is trained on: as many numbers.

        Args:
            batch: as the collate function made it, in the host's memory.
        """
        words = label_shares.labels_in(batch, shifted=self.engine.shifts_labels)
        if self.engine.pairs is None or not isinstance(batch, Mapping) or pair_losses.LABEL not in batch:
            return words
        return words, len(batch[pair_losses.LABEL])

    def _require_engine(self) -> None:
        """Check that the template has an engine, which ``__init__`` of a subclass may have kept to itself."""
        engine = getattr(self, "engine", None)
        if not hasattr(engine, "args"):
            raise UsageError(
                f"{type(self).__name__} with {'no' if engine is None else type(engine).__name__} engine",
                "a RapidformerEngine, passed by its __init__: super().__init__(engine=engine)",
                "Create it like this: Mine(engine=RapidformerEngine()).",
            )
        self.engine.used = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, one after another; see ``RapidformerEngine.gather``."""
        return self.engine.gather(tensor)

    def build_data_loader(
        self, dataset: Any, collate_fn: Collate | None = None, shuffle: bool = False
    ) -> Loader:
        """Return this rank's batches; see ``RapidformerEngine.build_data_loader``."""
        return self.engine.build_data_loader(dataset, collate_fn, shuffle)

    def _training_loader(self, data: providers.Datasets, shuffle: bool) -> Loader:
        args = self.engine.args
        steps = args.global_batch_size // args.micro_batch_size
        require_length(data.train, "the training data")
        loader = self.engine.loader(data.train, data.collate_fn, shuffle=shuffle, whole=steps)
        if not len(loader):
            raise UsageError(
                f"{len(data.train)} training samples with --global-batch-size {args.global_batch_size}",
                "at least one global batch",
                "Lower --global-batch-size, or provide more data.",
            )
        return loader

    def _require_known_tokens(self, data: providers.Datasets) -> None:
        """Check the tokens of data sets that have columns; those of others are looked at batch by batch."""
        for what, dataset in (("training", data.train), ("validation", data.valid), ("test", data.test)):
            vocabulary.require_known_column(dataset, self.engine.vocabulary, f"the {what} data")


class Finetuner(Template):
    """Fine-tunes a model: epochs of batches, and metrics after each.

    A subclass has four methods: ``train_valid_test_datasets_provider`` without arguments, which returns
    ``train_dataset, valid_dataset, test_dataset, collate_fn`` (None for a part that there is not; the test
    data are evaluated once, at the end, if they have labels);
    ``model_optimizer_lr_scheduler_provider``; ``run_forward_step(batch, model)``; and
    ``run_compute_metrics(model, eval_dataloader)``.
    """

    def run_compute_metrics(self, model: list[nn.Module], eval_dataloader: Loader) -> Any:
        """Return numbers by their names, of the validation or the test data; None: there are none.

        All ranks call it, and ``self.gather`` puts their parts together.

        Args:
            model: a list of the model alone (interleaved stages of Megatron would be more), in evaluation.
            eval_dataloader: batches on the device; every sample is there once (``RapidformerEngine.gather``).
        """
        return None

    def train(self) -> Outcome:
        """Train as the flags say; return how it went.

        Raises:
            UsageError: a method returns something else than it should; naming it. Or the flags cut the model.
        """
        self._require_engine()
        engine = self.engine
        if layout.is_cut(engine.args):
            raise layout.cannot_be_cut(engine.args, f"{type(self).__name__}, a Finetuner")
        data = providers.datasets(self, collates=True)
        batches = self._training_loader(data, shuffle=True)
        plan = RunPlan.of(engine.args, len(batches), len(data.train))
        model, optimizer, scheduler = providers.model(self)
        prepared = engine.prepare(model, optimizer, scheduler, plan)
        self._require_known_tokens(data)

        def forward(iterator: Iterator[Any]) -> Any:
            return self.run_forward_step(next(iterator), prepared.model)

        def evaluation_on(dataset: Any) -> loop.Evaluate | None:
            if dataset is None or not len(dataset):
                return None
            loader = engine.build_data_loader(dataset, data.collate_fn, repeats=True)

            def evaluate() -> Evaluation:
                found = providers.metrics(self, self.run_compute_metrics([prepared.model], loader))
                value = found.pop("loss", None)
                if value is None:
                    value = loop.mean_loss(self, forward, loader.held(0, once=True), len(loader))
                return Evaluation(value, found)

            return evaluate

        test = None if labels.not_given_away(data.test) else data.test
        evaluations = loop.Evaluations(evaluation_on(data.valid), evaluation_on(test))
        return loop.Loop(self, prepared, plan, batches, forward, evaluations).run()

    def finetune(self) -> Outcome:
        """Do what ``train`` does, under the name that the document's text has."""
        return self.train()


class PreTrainer(Template):
    """Pre-trains a model: iterations over data in their own order, and the validation loss now and then.

    A subclass has three methods: ``train_valid_test_datasets_provider(train_val_test_num_samples)``, which
    returns three data sets, or four values with a ``collate_fn``; ``model_optimizer_lr_scheduler_provider``;
    and ``run_forward_step(data_iterator, model)``, which takes a batch with ``next(data_iterator)``.
    """

    def train(self) -> Outcome:
        """Train as the flags say; return how it went.

        Raises:
            UsageError: a method returns something else than it should; naming it.
        """
        self._require_engine()
        with megatron_models.session(self):
            data = providers.datasets(self, self._samples(), collates=False)
            whole = not layout.is_cut(self.engine.args)
            batches = self._training_loader(data, shuffle=False) if whole else None
            model, optimizer, scheduler = providers.model(self)
            if batches is None or megatron_models.is_megatron(model):
                return megatron_models.train(self, data, model, optimizer, scheduler)
        return self._train(data, batches, model, optimizer, scheduler)

    def _train(
        self, data: providers.Datasets, batches: Loader, model: nn.Module, optimizer: Any, scheduler: Any
    ) -> Outcome:
        """Train a model that every process holds."""
        engine, args = self.engine, self.engine.args
        plan = RunPlan.of(args, len(batches))
        prepared = engine.prepare(model, optimizer, scheduler, plan)
        self._require_known_tokens(data)

        def forward(iterator: Iterator[Any]) -> Any:
            return self.run_forward_step(iterator, prepared.model)

        def evaluation_on(dataset: Any) -> Any:
            if dataset is None or not len(dataset) or not args.eval_iters:
                return None
            loader = engine.loader(dataset, data.collate_fn)
            micro_batches = args.eval_iters * plan.micro_batches
            held = functools.partial(loader.held_forever, once=True)
            return lambda: Evaluation(loop.mean_loss(self, forward, held(), micro_batches), {})

        evaluations = loop.Evaluations(evaluation_on(data.valid), evaluation_on(data.test))
        return loop.Loop(self, prepared, plan, batches, forward, evaluations).run()

    def pretrain(self) -> Outcome:
        """Do what ``train`` does, under the name that the document's text has."""
        return self.train()

    def label_counts(self, batch: Any) -> int | tuple[int, ...]:
        """Return over how many labels the loss of a batch is the mean; see ``Template.label_counts``.

        Of Megatron's windows (``text``, [b, s + 1]) under --eod-mask-loss: the tokens that are no end of a
        document, as ``get_ltor_masks_and_position_ids`` has them in its loss mask.
        """
        text = batch.get("text") if isinstance(batch, Mapping) else None
        if not self.engine.args.eod_mask_loss or not isinstance(text, torch.Tensor):
            return super().label_counts(batch)
        from megatron_npu.finetune.rapidformer.megatron_scripts import get_tokenizer

        return int((text[:, :-1] != get_tokenizer().eod).sum())

    def counts_labels(self) -> bool:
        """Return whether batches of one size may have different numbers of labels, of Megatron's models."""
        own = type(self).label_counts is not PreTrainer.label_counts
        return own or bool(self.engine.args.eod_mask_loss)

    def _samples(self) -> list[int]:
        """Return how many samples of training, validation and test are needed (as Megatron computes them).

        Raises:
            UsageError: --train-iters is missing, without which nobody knows; or --epochs is there for a model
                that is cut, whose stages go round and round.
        """
        args = self.engine.args
        if args.epochs is not None and layout.is_cut(args):
            raise UsageError(
                f"--epochs {args.epochs} with a model-parallel model",
                "only --train-iters N",
                "Remove --epochs.",
            )
        if args.train_iters is None:
            raise UsageError("pre-training without --train-iters", "--train-iters N", "Add --train-iters N.")
        evaluations = 1 + (args.train_iters // args.eval_interval if args.eval_interval else 0)
        iterations = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
        return [count * args.global_batch_size for count in iterations]


Pretrainer = PreTrainer  # the document has both spellings
