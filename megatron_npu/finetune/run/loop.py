"""Run the training loop of both templates: steps, evaluations, logging, saving and stopping."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_npu import devices, watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import replicas
from megatron_npu.devices.rows import Rows
from megatron_npu.finetune.data.loading import Loader, on_device, tokens_in
from megatron_npu.finetune.model.precision import SMALLEST
from megatron_npu.finetune.model.prepare import Prepared
from megatron_npu.finetune.rapidformer import providers
from megatron_npu.finetune.run import checkpoint, expert_balance, export
from megatron_npu.finetune.run.flag_parts import LoadFlags, LoopFlags, ReportFlags, SaveFlags
from megatron_npu.finetune.run.label_shares import Held, MicroBatches
from megatron_npu.finetune.run.outcome import Evaluation, Outcome
from megatron_npu.finetune.run.report import Report, Steps
from megatron_npu.finetune.run.run_plan import RunPlan
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.run.clock import Clock
from megatron_npu.pretrain.run.divergence import DivergedError, FirstNonFinite
from megatron_npu.pretrain.run.termination import Termination

if TYPE_CHECKING:
    from megatron_npu.finetune.rapidformer.templates import Template

Forward = Callable[[Iterator[Any]], Any]
Evaluate = Callable[[], Evaluation]


class Evaluations(NamedTuple):
    """The evaluations to run during and after training.

    Attributes:
        valid: the evaluation of the validation data, or None if there is no such data.
        test: the evaluation of the test data, once at the end, or None if there is no such data.
    """

    valid: Evaluate | None
    test: Evaluate | None = None


class Loop:
    """The training loop, which trains a prepared model.

    Args:
        template: the template.
        prepared: the prepared model.
        plan: the length of the training run.
        batches: training batches.
        forward: processes the next micro-batch and returns its loss or losses.
        evaluations: evaluations of validation and test data.
    """

    def __init__(
        self,
        template: Template,
        prepared: Prepared,
        plan: RunPlan,
        batches: Loader,
        forward: Forward,
        evaluations: Evaluations,
    ) -> None:
        self.template, self.engine = template, template.engine
        settled = plan.settled(self.engine.args)
        self.plan, self.flags = plan, LoopFlags.of(settled)
        self.reported = ReportFlags.of(settled)
        self.loads = None if settled.load is None else LoadFlags.of(settled)
        self.saves = SaveFlags.of(settled) if settled.save else None
        self.prepared, self.batches, self.forward = prepared, batches, forward
        self.evaluations = evaluations
        self.outcome = Outcome()
        self.iteration = 0
        self.balance = expert_balance.of(prepared.module, self.engine.args.world_size)
        self.clock = Clock()
        self.nonfinite = FirstNonFinite()
        self._begin = 0  # where this process's part of the run began
        self._losses = Rows()  # of this rank, since the last log event
        self._norms: list[float | None] = []
        self._tokens = 0  # of this rank, since then

    def run(self) -> Outcome:
        """Train until the end, or until a flag or a signal stops the training, and return the outcome."""
        said = self._load()
        with Report(self.reported, self.iteration, self.prepared.ledger) as self.report:
            for line in said:
                self.report.say(f" {line}")
            self.prepared.model.train()
            start = self.iteration * self.plan.micro_batches
            batches = micro_batches(self.template, self.batches.held_forever(start), self._count_tokens)
            balanced = contextlib.nullcontext() if self.balance is None else self.balance.armed()
            with balanced, Termination(self.flags.exit_signal_handler) as termination:
                self.clock.start()
                with watchdog.phase("between two steps"):
                    while self.iteration < self.plan.iterations:
                        self._iterate(batches)
                        if self._ends(termination):
                            break
                self.clock.stop()
            self._finish()
            self.report.end(self.outcome.ended_by)
        return self.outcome

    def _load(self) -> list[str]:
        """Resume from the newest checkpoint in --load, if there is one, and return log lines about it."""
        if self.loads is None:
            return []
        self.iteration, said = checkpoint.load(self.loads, self.prepared)
        self._begin = self.iteration
        return said

    def _iterate(self, batches: MicroBatches) -> None:
        """Train for one iteration, and log, evaluate and save if these are due."""
        flags = self.flags
        self._step(batches)
        self.report.tick()
        iteration = self.iteration
        if iteration % flags.log_interval == 0 or iteration in (self._begin + 1, self.plan.iterations):
            self._report()
        if iteration == self.plan.iterations:  # what is done then is done once, at the end
            return
        if iteration % (flags.eval_interval or self.plan.epoch) == 0:
            self._evaluate()
            self._draw()
        saves = self.saves
        if saves is not None and saves.save_interval and iteration % saves.save_interval == 0:
            self._save(saves)

    def _count_tokens(self, batch: Any) -> None:
        self._tokens += tokens_in(batch)

    def _forward_and_backward(self, batches: MicroBatches) -> torch.Tensor:
        """Accumulate the gradients of a global batch, and return this rank's part of the loss."""
        prepared, count = self.prepared, self.plan.micro_batches
        total = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        batches.begin(count)
        with self._balanced(batches):
            for number in range(count):
                with prepared.accumulating(last=number == count - 1):
                    with prepared.forward_context():
                        losses = losses_of(self.template, self.forward(batches), batches.losses)
                    divisors = batches.divisors()
                    parts = [loss / divisor for loss, divisor in zip(losses, divisors, strict=True)]
                    prepared.backward(functools.reduce(torch.add, parts))
                for loss, divisor in zip(losses, divisors, strict=True):
                    if not math.isinf(divisor):  # a mean over no labels is no number
                        total += loss.detach().float() / divisor
        return total

    @contextlib.contextmanager
    def _balanced(self, batches: MicroBatches) -> Iterator[None]:
        """Compute the experts' balancing loss over all tokens of the global batch.

        If there are several micro-batches, the experts that their tokens choose are counted in advance, with
        the same dropout masks as in training.
        """
        if self.balance is None:
            yield
            return
        if self.plan.micro_batches > 1:
            batches.read_ahead()
            with untouched_generators(), torch.no_grad(), batches.rehearsal(), self.balance.counting():
                for _ in range(self.plan.micro_batches):
                    with self.prepared.forward_context():
                        self.forward(batches)
        with self.balance.step(lambda: batches.coming_divisors()[0]):
            yield

    @watchdog.phase("training")
    def _step(self, batches: MicroBatches) -> None:
        watchdog.step(self.iteration + 1)
        self.nonfinite.forget()
        prepared, scale = self.prepared, self._scale()
        total = self._forward_and_backward(batches)
        if self.iteration == self._begin:
            self._require_gradients()
        compares = self._compares_replicas()
        if compares:
            replicas.require_equal("gradient of", self._gradients())
        norm = prepared.step()
        self.iteration += 1
        if compares:
            replicas.require_equal("weight", prepared.module.named_parameters())
            self.report.say(f" the replicas are identical after iteration {self.iteration}")
        if norm is None:
            self._overflowed(scale)
        elif not math.isfinite(norm):
            raise DivergedError(
                f"the gradient norm is {norm} at iteration {self.iteration}; nothing was saved "
                f"after this iteration. {self.nonfinite.words()} Lower --lr or check the data."
            )
        self._losses.add(total[None])
        self._norms.append(norm)

    def _scale(self) -> float:
        """Return the loss scale, or 1 if fp16 is not used."""
        return 1.0 if self.prepared.loss_scale is None else self.prepared.loss_scale.value

    def _overflowed(self, scale: float) -> None:
        """Log that an update was skipped because gradients overflowed.

        End the run if the gradient overflows even at the smallest loss scale.

        Raises:
            DivergedError: the gradient overflowed with the smallest loss scale.
        """
        self.report.say(f" iteration {self.iteration}: the gradient overflowed, so the update was skipped")
        if scale <= SMALLEST:
            raise DivergedError(
                f"the gradient overflows fp16 at iteration {self.iteration} with the smallest "
                f"loss scale, {SMALLEST:g}; nothing was saved after this iteration. "
                f"{self.nonfinite.words()} Lower --lr, pass --mixed-precision bf16, or check the "
                "data."
            )

    def _compares_replicas(self) -> bool:
        interval = self.flags.check_weight_hash_across_dp_replicas_interval
        if not interval or self.flags.world_size == 1:
            return False
        return (self.iteration + 1) % interval == 0

    def _require_gradients(self) -> None:
        """Reject, at the first step, a loss that does not depend on the model's weights."""
        if next(self._gradients(), None) is None:
            raise UsageError(
                f"{type(self.template).__name__}.run_forward_step returned a loss that does not depend on "
                "the model. Compute the loss with the model that is passed to the method."
            )

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = self.prepared.module.named_parameters()
        return ((name, p.grad) for name, p in named if p.grad is not None)

    def _report(self) -> None:
        """Log the iterations since the last report."""
        if not self._losses:
            return
        seconds = self.clock.lap()
        count = torch.tensor(float(self._tokens), dtype=torch.float32, device=self.engine.device)
        *losses, tokens = self._mean_over_ranks(torch.cat([self._losses.all(), count[None]])).tolist()
        self.report.training(
            self.iteration,
            Steps(
                losses,
                self._norms,
                seconds,
                learning_rate=float(self.prepared.optimizer.param_groups[0]["lr"]),
                tokens=round(tokens * self.flags.world_size),
                scale=self._scale(),
            ),
        )
        self.outcome.losses += losses
        self.outcome.grad_norms += self._norms
        self._losses, self._norms, self._tokens = Rows(), [], 0

    def _mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if self.flags.world_size > 1:
            dist.all_reduce(values)
        return values / self.flags.world_size

    def _evaluate(self) -> None:
        if self.evaluations.valid is None:
            return
        found = self._found_by(self.evaluations.valid)
        self.outcome.evaluations[self.iteration] = found
        self.report.evaluation(self.iteration, found.loss, found.metrics)

    def _test(self) -> None:
        if self.evaluations.test is None:
            return
        self.outcome.test = found = self._found_by(self.evaluations.test)
        self.report.test(self.iteration, found.loss, found.metrics)

    def _found_by(self, evaluate: Evaluate) -> Evaluation:
        """Evaluate with the training clock stopped, and restore the random generators afterwards."""
        model = self.prepared.model
        with (
            watchdog.phase("evaluating"),
            self.clock.paused(),
            untouched_generators(),
            torch.no_grad(),
            self.prepared.forward_context(),
        ):
            model.eval()
            found = evaluate()
            model.train()
        return found

    def _save(self, saves: SaveFlags) -> None:
        with self.clock.paused():
            place = checkpoint.save(saves, self.prepared, self.iteration)
        self.outcome.checkpoint = place
        self.report.say(f" saved {place}")
        self.report.write("checkpoint", self.iteration, {"path": str(place)})

    def _draw(self) -> None:
        with self.clock.paused():
            self.outcome.plot = self.report.draw()

    def _ends(self, termination: Termination) -> bool:
        if termination.requested():
            self.outcome.ended_by = "signal"
        elif self.flags.exit_interval and self.iteration % self.flags.exit_interval == 0:
            self.outcome.ended_by = "exit-interval"
        else:
            return False
        if self.iteration < self.plan.iterations:
            self.report.say(f" stopping at iteration {self.iteration}: {self.outcome.ended_by}")
        return True

    def _finish(self) -> None:
        """Log remaining iterations, evaluate and export a completely trained model, and save if needed."""
        self._report()
        complete = self.iteration >= self.plan.iterations
        if complete:
            self._evaluate()
        self.outcome.iteration = self.iteration
        is_new = self.iteration > self._begin
        saves, last = self.saves, self.outcome.checkpoint
        if saves is not None and is_new and last != checkpoint_files.directory(saves.save, self.iteration):
            self._save(saves)
        if complete:
            self._test()  # what it trips over costs no training: that is saved
            if saves is not None:
                self._export(saves)
        self._draw()

    def _export(self, saves: SaveFlags) -> None:
        tokenizer = getattr(self.template, "tokenizer", None)
        self.outcome.exported = export.write(saves, self.prepared, self.outcome, tokenizer)
        self.report.say(f" the trained model was written to {self.outcome.exported}")


@contextlib.contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the random generators of host and device at the end of the ``with`` block."""
    device = devices.current()
    host, own = device.host_rng_state(), device.rng_state()
    try:
        yield
    finally:
        device.set_host_rng_state(host)
        device.set_rng_state(own)


def micro_batches(
    template: Template, held: Iterable[Held], note: Callable[[Any], None] | None = None
) -> MicroBatches:
    """Return the micro-batches of a rank on its device, with each loss weighted by the number of labels."""
    engine = template.engine
    return MicroBatches(
        held,
        template.label_counts,
        move=lambda batch: on_device(batch, engine.device),
        ranks=engine.args.world_size,
        note=note,
    )


def losses_of(
    template: Template, returned: Any, number: int | None, *, training: bool = True
) -> tuple[torch.Tensor, ...]:
    """Return the losses of a micro-batch, each of which is a mean over its labels.

    Args:
        template, returned, number, training: as in ``providers.losses``.
    """
    pairs = template.engine.pairs
    if number is not None and pairs is not None and isinstance(returned, torch.Tensor):
        returned = pairs.split(providers.loss(template, returned, training=training))
    return providers.losses(template, returned, number, training=training)


def mean_loss(template: Template, forward: Forward, held: Iterable[Held], count: int) -> float:
    """Return the mean loss over the labels of ``count`` micro-batches on each rank."""
    batches = micro_batches(template, held)
    sums: dict[int, torch.Tensor] = {}  # of each loss, over its labels, and how many these are
    for _ in range(count):
        losses = losses_of(template, forward(batches), batches.losses, training=False)
        for part, (loss, labels) in enumerate(zip(losses, batches.counted(), strict=True)):
            whole = loss.detach().float() * labels if labels else loss.new_zeros((), dtype=torch.float32)
            added = torch.stack([whole, torch.full_like(whole, labels)])
            sums[part] = sums[part] + added if part in sums else added
    together = torch.stack(list(sums.values()))
    if template.engine.args.world_size > 1:
        dist.all_reduce(together)
    return float((together[:, 0] / together[:, 1]).sum())
