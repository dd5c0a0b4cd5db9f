"""Define ``Finetuner`` and ``PreTrainer``, the base classes of users' templates and of this project's
tasks.
"""

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
from megatron_npu.finetune.run import label_shares, loop
from megatron_npu.finetune.run.flag_parts import LengthFlags
from megatron_npu.finetune.run.layout import ModelParallel
from megatron_npu.finetune.run.outcome import Evaluation, Outcome
from megatron_npu.finetune.run.run_plan import RunPlan


class Template:
    """Base class of the two templates ``Finetuner`` and ``PreTrainer``.

    Args:
        engine: the engine of this process.
    """

    def __init__(self, engine: RapidformerEngine) -> None:
        self.engine = engine

    def train_valid_test_datasets_provider(self, *args: Any) -> Any:
        """Return the datasets; see ``Finetuner`` and ``PreTrainer``."""
        raise providers.missing(self, "train_valid_test_datasets_provider", "data sets")

    def model_optimizer_lr_scheduler_provider(self) -> tuple[nn.Module, Any, Any]:
        """Return the model, the optimizer and the scheduler.

        The optimizer and the scheduler may each be an object, a function that creates it (from the parameters
        or from an optimizer, respectively), or None, which selects fused AdamW or the schedule from the
        flags.
        """
        raise providers.missing(
            self, "model_optimizer_lr_scheduler_provider", "model, optimizer, lr_scheduler"
        )

    def run_forward_step(
        self, batch_or_iterator: Any, model: nn.Module
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the scalar loss of a micro-batch, averaged over the micro-batch's labels.

        Args:
            batch_or_iterator: a batch on the device (``Finetuner``), or an iterator of batches
                (``PreTrainer``).
            model: the model, which is called like the result of ``model_optimizer_lr_scheduler_provider``.
        """
        raise providers.missing(self, "run_forward_step", "the loss")

    def label_counts(self, batch: Any) -> int | tuple[int, ...]:
        """Return the number of labels over which a batch's loss is averaged.

        This is the weight of the loss.

        By default, this is the number of integer ``labels`` other than -100 (for causal Transformers models,
        without the first label of each text), or the number of samples if there are no labels. For a model
        with a next-sentence head, whose loss is the sum of two means, the result is a tuple of this number
        and the number of pairs. If ``run_forward_step`` returns a tuple of losses, whose sum is minimized,
        this method must return one number per loss.

        Args:
            batch: the result of the collate function, in host memory.
        """
        words = label_shares.labels_in(batch, shifted=self.engine.shifts_labels)
        if self.engine.pairs is None or not isinstance(batch, Mapping) or pair_losses.LABEL not in batch:
            return words
        return words, len(batch[pair_losses.LABEL])

    def _require_engine(self) -> None:
        """Check that the template has an engine.

        An overridden ``__init__`` may not have passed it on.
        """
        engine = getattr(self, "engine", None)
        if not hasattr(engine, "args"):
            raise UsageError(
                f"{type(self).__name__} must be created with a RapidformerEngine, which its __init__ passes "
                "on with super().__init__(engine=engine), but got "
                f"{'no engine' if engine is None else type(engine).__name__}. Write, for example, "
                "MyTrainer(engine=RapidformerEngine())."
            )
        self.engine.used = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks, and return the result; see ``RapidformerEngine.gather``."""
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
                f"the training data has {len(data.train)} samples, but it must have at least "
                f"--global-batch-size {args.global_batch_size}, one global batch. Lower --global-batch-size, "
                "or provide more data."
            )
        return loader

    def _require_known_tokens(self, data: providers.Datasets) -> None:
        """Check that all tokens in the datasets have embeddings, for datasets that have columns.

        Other datasets are checked batch by batch.
        """
        for what, dataset in (("training", data.train), ("validation", data.valid), ("test", data.test)):
            vocabulary.require_known_column(dataset, self.engine.vocabulary, f"the {what} data")


class Finetuner(Template):
    """Template that fine-tunes a model for a number of epochs, and computes metrics after each epoch.

    A subclass implements four methods: ``train_valid_test_datasets_provider`` without arguments, which
    returns ``train_dataset, valid_dataset, test_dataset, collate_fn`` (None for a missing split; a test set
    with labels is evaluated once, at the end of the run); ``model_optimizer_lr_scheduler_provider``;
    ``run_forward_step(batch, model)``; and ``run_compute_metrics(model, eval_dataloader)``.
    """

    def run_compute_metrics(self, model: list[nn.Module], eval_dataloader: Loader) -> Any:
        """Return the metrics of the validation or test data as a dict, or None.

        All ranks call this method, and ``self.gather`` concatenates their results.

        Args:
            model: a list that contains the model in evaluation mode (a list, because Megatron's interleaved
                schedule has several model chunks).
            eval_dataloader: batches on the device; every sample occurs once (``RapidformerEngine.gather``).
        """
        return None

    def train(self) -> Outcome:
        """Train as specified by the flags, and return the outcome.

        Raises:
            UsageError: a method returned something invalid, or the flags select model parallelism.
        """
        self._require_engine()
        engine = self.engine
        layout = ModelParallel.of(engine.args)
        if layout.is_cut:
            raise layout.refused_for(f"{type(self).__name__}, a Finetuner")
        data = providers.datasets(self, collates=True)
        batches = self._training_loader(data, shuffle=True)
        plan = RunPlan.of(LengthFlags.of(engine.args), len(batches), len(data.train))
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
        """Call ``train`` under the name that the PAI-Rapidformer document uses."""
        return self.train()


class PreTrainer(Template):
    """Template that pre-trains a model for a number of iterations, with a validation loss at intervals.

    A subclass implements three methods: ``train_valid_test_datasets_provider(train_val_test_num_samples)``,
    which returns three datasets, or four values with a ``collate_fn``;
    ``model_optimizer_lr_scheduler_provider``; and ``run_forward_step(data_iterator, model)``, which gets a
    batch with ``next(data_iterator)``.
    """

    def train(self) -> Outcome:
        """Train as specified by the flags, and return the outcome.

        Raises:
            UsageError: a method returned something invalid.
        """
        self._require_engine()
        with megatron_models.session(self):
            data = providers.datasets(self, self._samples(), collates=False)
            whole = not ModelParallel.of(self.engine.args).is_cut
            batches = self._training_loader(data, shuffle=False) if whole else None
            model, optimizer, scheduler = providers.model(self)
            if batches is None or megatron_models.is_megatron(model):
                return megatron_models.train(self, data, model, optimizer, scheduler)
        return self._train(data, batches, model, optimizer, scheduler)

    def _train(
        self, data: providers.Datasets, batches: Loader, model: nn.Module, optimizer: Any, scheduler: Any
    ) -> Outcome:
        """Train a model without model parallelism."""
        engine, args = self.engine, self.engine.args
        plan = RunPlan.of(LengthFlags.of(args), len(batches))
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
        """Call ``train`` under the name that the PAI-Rapidformer document uses."""
        return self.train()

    def label_counts(self, batch: Any) -> int | tuple[int, ...]:
        """Return the number of labels over which a batch's loss is averaged.

        See ``Template.label_counts``. For Megatron's windows (``text``, [b, s + 1]) with --eod-mask-loss,
        these are the tokens other than end-of-document tokens, as in the loss mask of
        ``get_ltor_masks_and_position_ids``.
        """
        text = batch.get("text") if isinstance(batch, Mapping) else None
        if not self.engine.args.eod_mask_loss or not isinstance(text, torch.Tensor):
            return super().label_counts(batch)
        from megatron_npu.finetune.rapidformer.megatron_scripts import get_tokenizer

        return int((text[:, :-1] != get_tokenizer().eod).sum())

    def counts_labels(self) -> bool:
        """Return True if equally large batches for a Megatron model may have different numbers of labels."""
        own = type(self).label_counts is not PreTrainer.label_counts
        return own or bool(self.engine.args.eod_mask_loss)

    def _samples(self) -> list[int]:
        """Return the numbers of training, validation and test samples, computed as in Megatron.

        Raises:
            UsageError: --train-iters is missing; or --epochs is given for a model-parallel model, which
                trains by iterations only.
        """
        args = self.engine.args
        if args.epochs is not None and ModelParallel.of(args).is_cut:
            raise UsageError(
                f"--epochs {args.epochs} cannot be used with a model-parallel model. Remove --epochs, and "
                "pass --train-iters N instead."
            )
        if args.train_iters is None:
            raise UsageError("--train-iters is required for pre-training. Add --train-iters N.")
        evaluations = 1 + (args.train_iters // args.eval_interval if args.eval_interval else 0)
        iterations = (args.train_iters, evaluations * args.eval_iters, args.eval_iters)
        return [count * args.global_batch_size for count in iterations]


Pretrainer = PreTrainer  # the document has both spellings
