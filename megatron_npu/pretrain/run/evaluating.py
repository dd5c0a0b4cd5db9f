"""Evaluate the model between two steps by computing losses on held-out data and generating sample texts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Dataset

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.devices.rows import Rows
from megatron_npu.pretrain.checkpoint import checkpoints
from megatron_npu.pretrain.checkpoint.checkpoints import Position
from megatron_npu.pretrain.data import datasets as data
from megatron_npu.pretrain.data import validation
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model.gathered_parameters import gathered
from megatron_npu.pretrain.report.drawn_texts import Samples
from megatron_npu.pretrain.report.log import Log
from megatron_npu.pretrain.run.losses import loss
from megatron_npu.pretrain.run.outcome import Prepared


class _TimeIsUpError(Exception):
    """Raised to abandon the current evaluation when the time limit has passed."""


class Evaluation:
    """Evaluates a model without affecting the random generators or the training data.

    Args:
        plan: the plan of the run.
        prepared: the model, and the training, validation and test data.
        log: the run's log.
        batches: returns micro batches of a dataset, starting after the given number of samples.
        forward: processes one global batch; returns this process's sum of losses and number of tokens, [2].
        time_is_up: called before each batch by all ranks; if it returns True, the validation is abandoned.

    Attributes:
        loss: the loss of the last validation (with several sets, their mean). If None, there was no
            validation.
        losses: the loss of each of several sets, by its prefix.
        test_loss: the loss on --test-data-path. If None, it has not been measured yet.
    """

    def __init__(
        self,
        plan: RunPlan,
        prepared: Prepared,
        log: Log,
        batches: Callable[[Dataset | None, int], data.Batches],
        forward: Callable[[data.Batches], torch.Tensor],
        time_is_up: Callable[[], bool],
    ) -> None:
        self.plan, self.datasets, self.log = plan, prepared.datasets, log
        self._model, self._batches, self._forward = prepared.state.model, batches, forward
        self._time_is_up = time_is_up
        self._sets = validation.sets(plan.evaluation, self.datasets)
        self._samples = Samples(samples, self._model) if (samples := plan.evaluation.samples) else None
        self.loss: float | None = None
        self.losses: dict[str, float] = {}
        self.test_loss: float | None = None

    def measure(self, position: Position) -> Position:
        """Run the evaluations that are due every --eval-interval, and return the new position."""
        try:
            position = self._validate(position)
        except _TimeIsUpError:
            self.log.say(
                f" no validation at iteration {position.iteration}: the time limit "
                "--exit-duration-in-mins has passed"
            )
            return position
        self._sample(position.iteration)
        return position

    def test(self, iteration: int) -> None:
        """Compute the loss on the samples of --test-data-path."""
        if self.datasets.test is None:
            return
        with self._evaluating():
            try:
                self.test_loss = self._mean_loss(self.datasets.test, 0, self.plan.evaluation.eval_iters)
            except _TimeIsUpError:
                return
        self.log.test(iteration, self.test_loss)

    def _validate(self, position: Position) -> Position:
        """Compute the loss on the validation samples and, if a flag requests it, on training samples."""
        if not self._sets:
            return position
        count, trained = self.plan.evaluation.eval_iters, None
        with self._evaluating():
            losses = [
                self._mean_loss(each.dataset, 0 if each.is_whole else position.valid_samples, each.batches)
                for each in self._sets
            ]
            if self.plan.evaluation.eval_train_loss and count:
                # always the first samples, so that two evaluations can be compared
                trained = self._mean_loss(self.datasets.train, 0, count)
        self.loss = sum(losses) / len(losses)
        pairs = [(each.name, loss) for each, loss in zip(self._sets, losses, strict=True) if each.name]
        self.losses = dict(pairs)
        self.log.validation(position.iteration, self.loss, trained, pairs)
        used = 0 if self.plan.evaluation.full_validation else count * self.plan.global_batch_size
        return checkpoints.advance(position, valid=used)

    def _sample(self, iteration: int) -> None:
        """Generate the texts for --sample-prompt.

        An error is logged and does not end training.
        """
        if self._samples is None:
            return
        with self._evaluating():
            try:
                texts = self._samples.draw()
            except UsageError as error:
                self.log.say(f" no sample at iteration {iteration}: {error}")
                return
        for text in texts:
            self.log.sample(iteration, text)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode, without gradients, inside the ``with`` block."""
        with (
            watchdog.phase("evaluating"),
            gathered(self._model, overlaps=self.plan.overlap_param_gather),
            torch.no_grad(),
        ):
            for chunk in self._model:
                chunk.eval()
            try:
                yield
            finally:
                for chunk in self._model:
                    chunk.train()

    def _mean_loss(self, dataset: Dataset | None, consumed: int, count: int) -> float:
        """Return the mean loss of ``count`` global batches.

        Raises:
            _TimeIsUpError: the time limit passed before the last of them.
        """
        batches = self._batches(dataset, consumed)
        sums = Rows()
        for _ in range(count):
            if self._time_is_up():
                raise _TimeIsUpError
            sums.add(self._forward(batches)[None])
        (mean,) = loss.means(sums.all().sum(0)[None])
        return mean
