"""The loop of both templates: one step, one evaluation, and when to log, evaluate, save and end."""

from __future__ import annotations

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_npu import devices, replicas, watchdog
from megatron_npu.acceleration import checkpoint, export, providers
from megatron_npu.acceleration.loading import Loader
from megatron_npu.acceleration.outcome import Evaluation, Outcome
from megatron_npu.acceleration.prepare import Prepared
from megatron_npu.acceleration.report import Report
from megatron_npu.devices.rows import Rows
from megatron_npu.errors import UsageError
from megatron_npu.training import checkpoint_files
from megatron_npu.training.clock import Clock
from megatron_npu.training.divergence import DivergedError, FirstNonFinite
from megatron_npu.training.termination import Termination

if TYPE_CHECKING:
    from megatron_npu.acceleration.templates import Template

Forward = Callable[[Iterator[Any]], torch.Tensor]
Evaluate = Callable[[], Evaluation]


class Loop:
    """Trains what was prepared.

    Args:
        template: whose model it is.
        prepared: the model, and what trains it.
        batches: of training.
        forward: takes the next micro-batch and returns its loss.
        evaluate: on the validation data; None: there are none.
        test: the same on the test data, once, at the end.
    """

    def __init__(
        self,
        template: Template,
        prepared: Prepared,
        batches: Loader,
        forward: Forward,
        evaluate: Evaluate | None,
        test: Evaluate | None = None,
    ) -> None:
        self.template, self.engine = template, template.engine
        self.args: Namespace = self.engine.args
        self.prepared, self.batches, self.forward = prepared, batches, forward
        self.evaluate, self.test = evaluate, test
        self.outcome = Outcome()
        self.iteration = 0
        self.clock = Clock()
        self.nonfinite = FirstNonFinite()
        self._begin = 0  # where this process's part of the run began
        self._losses = Rows()  # of this rank, since the last log event
        self._norms: list[float | None] = []
        self._tokens = 0  # of this rank, since then

    def run(self) -> Outcome:
        """Train to the end, or to where a flag or a signal ends it; return how it went."""
        said = self._load()
        with Report(self.args, self.iteration, self.prepared.ledger) as self.report:
            for line in said:
                self.report.say(f" {line}")
            self.prepared.model.train()
            batches = self._counted(self.batches.forever(self.iteration * self.args.num_microbatches))
            with Termination(self.args.exit_signal_handler) as termination:
                self.clock.start()
                while self.iteration < self.args.train_iters:
                    self._iterate(batches)
                    if self._ends(termination):
                        break
                self.clock.stop()
            self._finish()
            self.report.end(self.outcome.ended_by)
        return self.outcome

    def _load(self) -> list[str]:
        """Go on from the newest checkpoint of --load, if there is one; return what there is to say."""
        if self.args.load_from is None:
            return []
        self.iteration, said = checkpoint.load(self.args, self.prepared)
        self._begin = self.iteration
        return said

    def _iterate(self, batches: Iterator[Any]) -> None:
        """Train one iteration; log, evaluate and save if it is time."""
        args = self.args
        self._step(batches)
        self.report.tick()
        iteration = self.iteration
        if iteration % args.log_interval == 0 or iteration in (self._begin + 1, args.train_iters):
            self._report()
        if iteration == args.train_iters:  # what is done then is done once, at the end
            return
        if iteration % (args.eval_interval or args.epoch_iters) == 0:
            self._evaluate()
            self._draw()
        if args.save_interval and iteration % args.save_interval == 0:
            self._save()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._tokens += tokens_in(batch)
            yield batch

    def _step(self, batches: Iterator[Any]) -> None:
        watchdog.step(self.iteration + 1)
        self.nonfinite.forget()
        prepared, count = self.prepared, self.args.num_microbatches
        total = torch.zeros((), dtype=torch.float32, device=self.engine.device)
        for number in range(count):
            with prepared.accumulating(last=number == count - 1):
                with prepared.forward_context():
                    loss = providers.loss(self.template, self.forward(batches))
                prepared.backward(loss / count)
            total += loss.detach().float() / count
        if self.iteration == self._begin:
            self._require_gradients()
        compares = self._compares_replicas()
        if compares:
            replicas.require_equal("gradient of", self._gradients())
        norm = prepared.step()
        self.iteration += 1
        if compares:
            replicas.require_equal("weight", prepared.module.named_parameters())
            self.report.say(f" the replicas are the same after iteration {self.iteration}")
        if norm is None:
            self.report.say(f" iteration {self.iteration}: the gradient overflowed, update left out")
        elif not math.isfinite(norm):
            raise DivergedError(
                f"the norm of the gradient is {norm} at iteration {self.iteration}; nothing was saved after "
                f"it. {self.nonfinite.words()} Lower --lr or look at the data."
            )
        self._losses.add(total[None])
        self._norms.append(norm)

    def _compares_replicas(self) -> bool:
        interval = self.args.check_weight_hash_across_dp_replicas_interval
        return bool(interval) and (self.iteration + 1) % interval == 0 and self.args.world_size > 1

    def _require_gradients(self) -> None:
        """Refuse, at the first step, a loss that no weight of the model has a part in.

        DeepSpeed's engine keeps gradients elsewhere.
        """
        if self.args.deepspeed_config is None and next(self._gradients(), None) is None:
            raise UsageError(
                f"{type(self.template).__name__}.run_forward_step returned a loss of other weights",
                "one that depends on those of the model it is given",
                "Call that model.",
            )

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = self.prepared.module.named_parameters()
        return ((name, p.grad) for name, p in named if p.grad is not None)

    def _report(self) -> None:
        """Log what was gathered since the last time."""
        if not self._losses:
            return
        seconds = self.clock.lap()
        count = torch.tensor(float(self._tokens), dtype=torch.float32, device=self.engine.device)
        *losses, tokens = self._mean_over_ranks(torch.cat([self._losses.all(), count[None]])).tolist()
        scale = self.prepared.loss_scale
        self.report.training(
            self.iteration,
            losses,
            self._norms,
            seconds,
            learning_rate=float(self.prepared.optimizer.param_groups[0]["lr"]),
            tokens=round(tokens * self.args.world_size),
            scale=1.0 if scale is None else scale.value,
        )
        self.outcome.losses += losses
        self.outcome.grad_norms += self._norms
        self._losses, self._norms, self._tokens = Rows(), [], 0

    def _mean_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        if self.args.world_size > 1:
            dist.all_reduce(values)
        return values / self.args.world_size

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        found = self._found_by(self.evaluate)
        self.outcome.evaluations[self.iteration] = found
        self.report.evaluation(self.iteration, found.loss, found.metrics)

    def _test(self) -> None:
        if self.test is None:
            return
        self.outcome.test = found = self._found_by(self.test)
        self.report.test(self.iteration, found.loss, found.metrics)

    def _found_by(self, evaluate: Evaluate) -> Evaluation:
        """Evaluate, outside the time of training, and leave the random generators as they are."""
        model = self.prepared.model
        with (
            self.clock.paused(),
            untouched_generators(),
            torch.no_grad(),
            self.prepared.forward_context(),
        ):
            model.eval()
            found = evaluate()
            model.train()
        return found

    def _save(self) -> None:
        with self.clock.paused():
            place = checkpoint.save(self.args, self.prepared, self.iteration)
        self.outcome.checkpoint = place
        self.report.say(f" saved {place}")
        self.report.write("checkpoint", self.iteration, {"path": str(place)})

    def _draw(self) -> None:
        with self.clock.paused():
            self.outcome.plot = self.report.draw()

    def _ends(self, termination: Termination) -> bool:
        if termination.requested():
            self.outcome.ended_by = "signal"
        elif self.args.exit_interval and self.iteration % self.args.exit_interval == 0:
            self.outcome.ended_by = "exit-interval"
        else:
            return False
        if self.iteration < self.args.train_iters:
            self.report.say(f" ending at iteration {self.iteration}: {self.outcome.ended_by}")
        return True

    def _finish(self) -> None:
        """Log the rest; evaluate and export at the true end; save what is not saved yet."""
        self._report()
        complete = self.iteration >= self.args.train_iters
        if complete:
            self._evaluate()
        self.outcome.iteration = self.iteration
        is_new = self.iteration > self._begin
        if self.args.save and is_new and self.outcome.checkpoint != self._place():
            self._save()
        if complete:
            self._test()  # what it trips over costs no training: that is saved
            if self.args.save:
                self._export()
        self._draw()

    def _place(self) -> Path:
        return checkpoint_files.directory(self.args.save, self.iteration)

    def _export(self) -> None:
        tokenizer = getattr(self.template, "tokenizer", None)
        self.outcome.exported = export.write(self.args, self.prepared, self.outcome, tokenizer)
        self.report.say(f" the trained model is in {self.outcome.exported}")


@contextlib.contextmanager
def untouched_generators() -> Iterator[None]:
    """Leave the generators of host and device behind the block as they were before it."""
    device = devices.current()
    host, own = device.host_rng_state(), device.rng_state()
    try:
        yield
    finally:
        device.set_host_rng_state(host)
        device.set_rng_state(own)


def tokens_in(batch: Any) -> int:
    """Return the tokens of a batch, padding included; 0 for one that is not of text."""
    for name in ("input_ids", "text", "tokens"):
        tokens = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(tokens, torch.Tensor):
            return tokens.numel()
    return 0


def mean_loss(template: Template, forward: Forward, batches: Iterator[Any], count: int) -> float:
    """Return the mean of the losses of so many micro-batches of each rank, over all ranks."""
    total = torch.zeros((), dtype=torch.float32, device=template.engine.device)
    for _ in range(count):
        total += providers.loss(template, forward(batches), training=False).float()
    if template.engine.args.world_size > 1:
        dist.all_reduce(total)
    return float(total) / (count * template.engine.args.world_size)
