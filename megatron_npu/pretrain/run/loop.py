"""Implement the training loop: one step, and the decisions when to log, evaluate, save and end."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron_npu import devices, watchdog
from megatron_npu.checkpoint_files import replicas
from megatron_npu.pretrain.checkpoint import checkpoints as checkpoint
from megatron_npu.pretrain.data import datasets as data
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model.gathered_parameters import gathered
from megatron_npu.pretrain.report.log import Interval, Log, Steps
from megatron_npu.pretrain.report.rank_times import RankTimes
from megatron_npu.pretrain.run.bad_iterations import Fault, Guard
from megatron_npu.pretrain.run.clock import Clock
from megatron_npu.pretrain.run.divergence import DivergedError, FirstNonFinite, Spikes
from megatron_npu.pretrain.run.evaluating import Evaluation
from megatron_npu.pretrain.run.losses import loss
from megatron_npu.pretrain.run.losses.expert_losses import ExpertLosses
from megatron_npu.pretrain.run.losses.prediction_losses import PredictionLosses
from megatron_npu.pretrain.run.outcome import Outcome, Prepared
from megatron_npu.pretrain.run.pace import Pace
from megatron_npu.pretrain.run.saving import Saving
from megatron_npu.pretrain.run.step_graph import StepGraph
from megatron_npu.pretrain.run.termination import Deadline, Termination

OnGradients = Callable[[int, list[torch.nn.Module]], None]


class Trainer:
    """The training loop, which trains a model from a given position.

    Args:
        plan: the plan of the run.
        prepared: the model and the data.
        log: the run's log.
        on_gradients: called in each iteration with its number and the model's chunks, when every
            ``main_grad`` is complete and before the optimizer's step.
        began: start time of the command, as returned by ``time.monotonic``. If None, the current time.
    """

    # what a user can do about a NaN loss
    goes_on = "; --no-check-for-nan-in-loss-and-grad continues anyway"

    def __init__(
        self,
        plan: RunPlan,
        prepared: Prepared,
        log: Log,
        on_gradients: OnGradients | None = None,
        began: float | None = None,
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.plan, self.log, self.on_gradients = plan, log, on_gradients
        self.state, self.datasets, self.position = prepared
        self.of_experts = ExpertLosses.of(plan.experts)
        self.of_predictions = PredictionLosses(plan.sizes.mtp_num_layers or 0)
        self.begin = self.position.iteration
        self.outcome = Outcome(self.position)
        self.clock = Clock()
        self.interval, self.pace, self.spikes = Interval(), Pace(), Spikes()
        self._source: data.Batches = None  # of training, where the run stands
        self._data: data.Batches = None  # the same in the guard's form
        self.guard = Guard(plan, self.state, self.spikes, log.say)
        self.nonfinite = FirstNonFinite()
        forward = functools.partial(self._forward, forward_only=True)
        self.times = RankTimes(measures=not plan.captures_steps)
        began = time.monotonic() if began is None else began
        self.deadline = Deadline(plan.ends.exit_duration_in_mins, began)
        self.evaluation = Evaluation(plan, prepared, log, self.batches, forward, self.deadline.has_passed)
        self.saving = Saving(plan, self.state, self.clock, log)
        compute = get_forward_backward_func()
        self.forward_backward: Callable[..., list[torch.Tensor]] = compute
        if plan.captures_steps:
            self.forward_backward = StepGraph(compute)
        self.no_loss = torch.zeros(2, dtype=torch.float32, device=devices.current().torch_device())

    def run(self) -> Outcome:
        """Train until the last iteration or until a flag or a signal ends the run; then evaluate and save."""
        self.log.places(self.position.iteration, self.times.places)
        self.of_experts.forget()
        self.of_predictions.forget()
        for chunk in self.state.model:
            chunk.train()
        self._open_data()
        with self.saving, contextlib.closing(self):
            ends = self.plan.ends
            heard = (signal.Signals[ends.exit_signal], signal.SIGINT)
            with Termination(ends.exit_signal_handler, heard) as termination:
                self.clock.start()
                with watchdog.phase("between two steps"):
                    while self.position.iteration < self.plan.iterations:
                        self._iterate()
                        if self._ends(termination):
                            break
                self.clock.stop()
            self._finish()
        return self.outcome

    def _open_data(self) -> None:
        """Open the training data at the run's position, and stop reading from an earlier position."""
        self.close()
        self._source = self.training_batches()
        self._data = self.guard.batches(self._source)

    def close(self) -> None:
        """Stop the processes that read the training data."""
        # Python's collector ends the threads that tell them to stop first, and waits 5 s for each process
        for each in self._source or ():
            if isinstance(each, Generator):
                each.close()

    def training_batches(self) -> data.Batches:
        """Return micro-batches of the training data, starting at the run's position."""
        return data.training_batches(self.plan.batches, self.datasets.train, self.position.train_samples)

    def batches(self, dataset: Dataset | None, consumed: int) -> data.Batches:
        """Return micro-batches for an evaluation, starting after ``consumed`` samples."""
        return data.batches(self.plan.batches, dataset, consumed)

    def forward_step(self, batches: Any, chunk: torch.nn.Module) -> tuple[Any, Any]:
        """Run one micro-batch through one model chunk, with the signature that megatron-core expects."""
        return _forward_step(batches, chunk, self.plan.sums_over_context)

    def _iterate(self) -> None:
        """Train for one iteration, and log, evaluate and save if these are due."""
        due, end = self.plan.loop, self.plan.iterations
        if not self._step():
            return
        iteration = self.position.iteration
        self.log.tick()
        self.saving.take_finished()
        if iteration % due.log_interval == 0 or iteration in (self.begin + 1, end):
            self._report()
        last = iteration == end  # what is done then is done once, at the end
        if due.eval_interval and iteration % due.eval_interval == 0 and not last:
            with self.clock.paused():
                self._evaluate()
                self.log.draw()
        every = self.plan.saves.save_interval
        if every and iteration % every == 0 and not last:
            self.saving.save(self.position)

    @watchdog.phase("training")
    def _step(self) -> bool:
        """Train for one iteration, and return False if the run has rewound to a checkpoint instead."""
        watchdog.step(self.position.iteration + 1)
        if self.position.iteration in self.plan.loop.iterations_to_skip:
            self._skip_data()
            return True
        self.guard.begin()
        losses = self._compute_gradients()
        if self.guard.watches:
            losses, fault = self.guard.judged(self.position.iteration + 1, losses, self._compute_gradients)
            if fault is not None and not self._goes_on(fault):
                return self._evade(fault, losses)
        self._update(losses)
        return True

    def _compute_gradients(self) -> torch.Tensor:
        """Compute the gradients of a global batch. Return this process's loss sum and token count, [2]."""
        self.nonfinite.forget()
        for chunk in self.state.model:
            chunk.zero_grad_buffer()
        self.state.optimizer.zero_grad()
        self.times.begin()
        count = self.plan.micro_batches_of(self._batch())
        return self._forward(self._data, forward_only=False, micro_batches=count)

    def _batch(self) -> int:
        """Return the number of sequences, on all ranks, in the next iteration."""
        return self.plan.batch_behind(self.position.train_samples)

    def _skip_data(self) -> None:
        """Skip the samples of an iteration listed in --iterations-to-skip, as upstream's loop does."""
        self._report()  # the iterations of a log event follow one another
        for batches in self._data or ():
            for _ in range(self.plan.micro_batches_of(self._batch())):
                next(batches)
        self._advance()
        self.log.say(f" iteration {self.position.iteration}: skipped with its data (--iterations-to-skip)")

    def _advance(self) -> None:
        self.position = checkpoint.advance(self.position, train=self._batch(), iterations=1)

    def _goes_on(self, fault: Fault) -> bool:
        """Return True if the weights should be updated in spite of a fault, which is logged.

        Raises:
            DivergedError: the loss or gradient is NaN or infinite, and the flags do not allow it.
        """
        if self.guard.acts:
            return False
        if not fault.is_leap:
            self._diverged(fault.words)
        self.log.say(f" {fault.words}")
        return True

    def _evade(self, fault: Fault, losses: torch.Tensor) -> bool:
        """Skip this weight update, or rewind to the last good checkpoint. Return False after rewinding."""
        self.saving.wait()  # what is being written may be the last good one
        to = self.guard.goes_back_to() if self.plan.guard.loss_spike_policy == "rewind" else None
        if to is None:
            self.guard.leave_out(fault)
            self._count(losses, None, updated=False)
            return True
        self._report()  # of what came before
        self._advance()
        with self.clock.paused(), gathered(self.state.model, overlaps=self.plan.overlap_param_gather):
            self.position = self.guard.go_back(to, fault, self.position)
        self.log.write("rewind", to, {"fault": fault.words})
        self._open_data()
        return False

    def _count(self, losses: torch.Tensor, norm: float | None, *, updated: bool) -> None:
        """Record an iteration for the log, and advance the position."""
        self.interval.losses.add(losses[None])
        self.interval.norms.append(norm)
        self.interval.batches.append(self._batch())
        self.interval.skipped += not updated
        self._advance()

    def _update(self, losses: torch.Tensor) -> None:
        """Update the weights with the computed gradients."""
        model, optimizer = self.state.model, self.state.optimizer
        if self.on_gradients is not None:
            self.on_gradients(self.position.iteration + 1, model)
        compares = self._compares_replicas()
        if compares:
            replicas.check_megatron_gradients(model)
        updated, norm, _ = optimizer.step()
        self._check_gradient(norm)
        if updated:
            self.state.schedule.step(self._batch())
        else:
            self._report_skipped_update()
        self._count(losses, None if norm is None else float(norm), updated=updated)
        if compares:
            self._compare_weights()

    def _compares_replicas(self) -> bool:
        interval = self.plan.loop.check_weight_hash_across_dp_replicas_interval
        return (self.position.iteration + 1) % interval == 0 if interval else False

    def _compare_weights(self) -> None:
        with gathered(self.state.model, overlaps=self.plan.overlap_param_gather):
            replicas.check_megatron(self.state.model)
        self.log.say(f" the replicas are identical after iteration {self.position.iteration}")

    def _forward(
        self,
        batches: list[Iterator[data.Batch]] | None,
        *,
        forward_only: bool,
        micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Run one global batch, and return the loss sum and the token count of this process, ``[2]``."""
        model = self.state.model
        single = len(model) == 1
        iterators: list[Iterator[data.Batch] | None] = [*batches] if batches else [None] * len(model)
        outputs = self.forward_backward(
            forward_step_func=self.times.timed(self.forward_step),
            data_iterator=iterators[0] if single else iterators,
            model=model[0] if single else model,
            num_microbatches=micro_batches or self.plan.micro_batches,
            seq_length=self.plan.seq_length,
            micro_batch_size=self.plan.micro_batch_size,
            forward_only=forward_only,
        )
        return torch.stack(outputs).sum(0) if outputs else self.no_loss

    def _check_gradient(self, norm: float | None) -> None:
        """End the run if the gradient norm is not finite. With fp16, the update is skipped instead."""
        if norm is not None and not math.isfinite(norm):
            self._diverged(f"the gradient norm is {norm} at iteration {self.position.iteration + 1}")

    def _check_losses(self, losses: list[float]) -> None:
        """End the run if a loss is NaN or infinite although its gradient is finite. Log loss spikes."""
        if self.guard.watches:  # which has looked at each before its update
            return
        last = self.position.iteration
        for number, value in enumerate(losses, last - len(losses) + 1):
            if not math.isfinite(value):
                self._diverged(f"the loss is {value} at iteration {number}")
        if leap := self.spikes.note(last, losses):
            self.log.say(f" {leap}")

    def _diverged(self, what: str) -> None:
        if self.plan.guard.check_for_nan_in_loss_and_grad and not self.plan.guard.fp16:
            raise DivergedError(
                f"{what}; nothing was saved after this iteration. {self.nonfinite.words()} Lower "
                f"--lr or check the data{self.goes_on}."
            )

    def _report_skipped_update(self) -> None:
        scale = self.state.optimizer.get_loss_scale().item()
        self.log.say(
            f" iteration {self.position.iteration + 1}: the gradient overflowed, so the "
            f"update is skipped and the loss scale is now {scale:g}"
        )

    def _report(self) -> None:
        """Log the iterations since the last report."""
        if not self.interval.losses:
            return
        groups = self.state.optimizer.param_groups
        seconds, times = self.clock.lap(), self.times.take()
        losses = loss.means(self.interval.losses.all())
        samples = sum(self.interval.batches)
        count = self.plan.micro_batches_of(samples)
        self.log.training(
            self.position.iteration,
            Steps(
                self.position.train_samples,
                self.interval,
                losses,
                seconds,
                learning_rate=groups[0]["lr"] if groups else 0.0,
                scale=self.state.optimizer.get_loss_scale().item(),
            ),
            of_ranks=loss.of_ranks(self.interval.losses.all()) if self.plan.loop.log_loss_per_rank else None,
            of_experts=self.of_experts.take(count),
            of_predictions=self.of_predictions.take(),
            milliseconds=times,
        )
        self._check_losses(losses)
        for line in (self.pace.note(seconds, len(losses)), self.times.slow(times, len(losses))):
            if line:
                self.log.say(line)
        if self.outcome.loss_first is None:
            self.outcome.loss_first = losses[0]
            self.outcome.first_seconds, self.outcome.first_steps = seconds, len(losses)
            self.outcome.first_samples = samples
        self.outcome.loss_last = losses[-1]
        self.outcome.steps += len(losses)
        self.outcome.samples += samples
        self.interval = Interval()

    def _evaluate(self) -> None:
        self.position = self.evaluation.measure(self.position)

    def _ends(self, termination: Termination) -> bool:
        iteration = self.position.iteration
        if termination.requested():
            self.outcome.ended_by = "signal"
        elif self.deadline.has_passed():
            self.outcome.ended_by = "exit-duration"
        elif (every := self.plan.ends.exit_interval) and iteration % every == 0:
            self.outcome.ended_by = "exit-interval"
        else:
            return False
        if iteration < self.plan.iterations:
            self.log.say(f" stopping at iteration {iteration}: {self.outcome.ended_by}")
        return True

    def _finish(self) -> None:
        """Log the remaining iterations, evaluate if training is complete, and save unless already saved."""
        plan, saves = self.plan, bool(self.plan.saves.save)
        self._report()
        self.saving.wait()
        iteration = self.position.iteration
        if iteration >= plan.iterations and not (plan.only_saves and saves):
            self._evaluate()
            self.evaluation.test(iteration)
        is_new = iteration > self.begin or (plan.only_saves and plan.load_from is None) or plan.takes_over
        if saves and is_new:
            self.saving.save_last(self.position)
        self.outcome.position = self.position
        self.outcome.seconds = self.clock.total
        self.outcome.checkpoint = self.saving.last
        self.outcome.validation_loss, self.outcome.test_loss = self.evaluation.loss, self.evaluation.test_loss
        self.outcome.validation_losses = self.evaluation.losses


def _forward_step(
    batches: Iterator[data.Batch] | None, model: torch.nn.Module, of_all_parts: bool
) -> tuple[Any, Any]:
    """Run one micro-batch through one model chunk; see ``loss.masked_sum`` for the argument
    ``of_all_parts``.
    """
    batch = {} if batches is None else next(batches)
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),  # of multi-token prediction, whose losses the model adds itself
    )
    return output, lambda losses: loss.masked_sum(batch["loss_mask"], losses, of_all_parts)
