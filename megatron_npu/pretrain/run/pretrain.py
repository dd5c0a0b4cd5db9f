"""Implement ``megatron-npu pretrain``: parse and check the flags, build the model, train it and report."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_npu import devices, plugin, watchdog
from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import shared_folder
from megatron_npu.pretrain.checkpoint import checkpoints as checkpoint
from megatron_npu.pretrain.checkpoint import save_folder, stock_checkpoints
from megatron_npu.pretrain.checkpoint.weights import row_shards
from megatron_npu.pretrain.data import datasets as data
from megatron_npu.pretrain.flags import arguments, run_config, validation
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import LogFlags, SinkFlags
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model import gpt
from megatron_npu.pretrain.report import flops, history, log, sinks
from megatron_npu.pretrain.report.dashboard.process import shown
from megatron_npu.pretrain.run import initialize, last_words, loop, resume_changes
from megatron_npu.pretrain.run.outcome import Outcome, Prepared
from megatron_npu.process import collector, extension_locks
from megatron_npu.web.address import Address

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Summary:
    """The result of a run, which is also written to ``<save>/summary.json``.

    Values that do not apply are None.

    Attributes:
        device, backend, upstream: what the run used, such as ``cpu``, ``gloo``, ``megatron_core 0.16.1``.
        simulated: whether the device is simulated, so that times and throughput are meaningless.
        ledger: the patch report as a single line.
        world_size: the number of processes.
        parameters, parameters_without_embeddings: the numbers of weights of the whole model.
        active_parameters: the number of weights used per token, which is lower with experts.
        iterations, consumed_samples: counted since the start of the run.
        loss_first, loss_last: the training loss of the first and last iteration since the start of the run,
            in nats per token.
        validation_loss, validation_perplexity: results of the last evaluation; with several sets, their mean.
        validation_losses: the loss of each of several sets, by its prefix.
        test_loss: the loss of the final evaluation on --test-data-path.
        tokens_per_second, tflops_per_device: values for this part of the run without its first log event; if
            nothing was left to train, those of the last log event of an earlier part.
        peak_memory_bytes: the peak memory of rank 0.
        ended_by: ``iterations``, ``exit-interval``, ``exit-duration`` or ``signal``.
        checkpoint, plot, metrics: paths.
    """

    device: str
    backend: str
    simulated: bool
    upstream: str
    ledger: str
    world_size: int
    parameters: int
    parameters_without_embeddings: int
    active_parameters: int
    iterations: int
    consumed_samples: int
    loss_first: float | None
    loss_last: float | None
    validation_loss: float | None
    validation_perplexity: float | None
    validation_losses: dict[str, float]
    test_loss: float | None
    tokens_per_second: float | None
    tflops_per_device: float | None
    peak_memory_bytes: int
    ended_by: str
    checkpoint: str | None
    plot: str | None
    metrics: str | None


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: invalid input; rank 0 reports it, and so do other ranks unless they are stopped before.
    """
    initialize.silence_known_warnings()
    args = None
    try:
        args = arguments.parse(argv)
        extension_locks.remove_stale("megatron-npu pretrain")  # 0.19's core would wait forever for them
        train(args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(last_words.what_is_saved(args.save if args else None)) from None
    except UsageError as error:
        if int(os.environ.get("RANK", "0")):
            watchdog.tell_others(error)
            last_words.wait_for_rank_0_to_report()
        raise
    except last_words.FAILURES as failure:
        return last_words.tell("pretrain", failure)
    return 0


def train(args: Namespace, on_gradients: loop.OnGradients | None = None) -> Summary:
    """Train a model as specified by the flags.

    Args:
        args: the result of ``arguments.parse``.
        on_gradients: called in each iteration with its number and the model's chunks, when every
            ``main_grad`` is complete and before the optimizer's step.

    Raises:
        UsageError: invalid input; nothing has been written.
        DivergedError: the gradient is NaN or infinite.
        ReplicasDifferError: data-parallel ranks have different weights or gradients.
    """
    began = time.monotonic()
    plugin.install()
    flags = validation.check(args)
    plan = RunPlan.of(flags)
    config = gpt.transformer_config(flags)
    repeatable = initialize.deterministic(flags.deterministic_mode)
    shows = _dashboard(plan.log, flags.dashboard)
    with save_folder.owned(plan.saves.save, plan.rank), shows, initialize.session(flags), repeatable:
        save_folder.require_shared(
            plan.saves.save, per_machine=flags.save_per_machine, storage=flags.object_storage
        )
        chunks = gpt.build(flags, config)
        datasets = data.datasets(plan.data) if plan.has_data else data.Datasets(None, None, None)
        trainer = functools.partial(loop.Trainer, on_gradients=on_gradients, began=began)
        collector.resume()
        saves = flags.save and plan.rank == 0
        own = run_config.text_of(args, flags, arguments.parser()) if saves else None
        return train_chunks(plan, config, chunks, datasets, trainer, own_config=own)[1]


def train_chunks(
    plan: RunPlan,
    config: TransformerConfig,
    chunks: list[DistributedDataParallel],
    datasets: data.Datasets,
    trainer: Callable[..., loop.Trainer],
    journal_of: Callable[[LogFlags, int], log.Log] = log.Log,
    own_config: str | None = None,
) -> tuple[Outcome, Summary]:
    """Train the given model chunks inside ``initialize.session``.

    Return the outcome and the summary.

    Args:
        plan: the plan of the run.
        config: the model's configuration.
        chunks: the results of ``model.wrapped``.
        datasets: the training, validation and test data.
        trainer: ``loop.Trainer`` or a subclass.
        journal_of: creates the log for the first iteration.
        own_config: the text of ``config.yaml`` for ``--save``. If None, this rank does not write the file.

    Raises:
        UsageError: the checkpoint to resume from does not match the run.
        DivergedError: the gradient is NaN or infinite.
        ReplicasDifferError: data-parallel ranks have different weights or gradients.
    """
    flags, place = plan.flags, plan.load_from
    if flags.load:
        shared_folder.require_same("--load", flags.load, place.name if place else None)
    optimizer = gpt.optimizer(flags, chunks)
    state = checkpoint.State(chunks, optimizer, gpt.schedule(plan.schedule, optimizer))
    gpt.connect(plan, config, chunks, optimizer)
    size = gpt.count(plan.experts, chunks)
    if plan.fully_sharded == "torch" and (flags.save or plan.load_from):
        row_shards.require_even(chunks)
    position = checkpoint.load(plan.loads, state) if plan.loads else checkpoint.Position()
    if own_config is not None:  # not earlier: a resume that is refused changes nothing
        files.write(Path(flags.save) / "config.yaml", own_config)
    journal = journal_of(plan.log, position.iteration)
    try:
        _log_start(plan, size, journal, position)
        outcome = trainer(plan, Prepared(state, datasets, position), journal).run()
        summary = _report(plan, size, outcome, journal)
        journal.end(outcome.ended_by)
        return outcome, summary
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk may be full: that is what has to be told then
            journal.end(type(error).__name__)
        raise
    finally:
        journal.close()


@contextlib.contextmanager
def _dashboard(places: SinkFlags, address: Address | None) -> Iterator[None]:
    """Serve the dashboard of the run inside the ``with`` block if the flags request it."""
    metrics = sinks.metrics_path(places)
    if address is None or places.rank or metrics is None:
        yield
        return
    with shown(metrics, address) as url:
        print(f" dashboard of the run: {url}", flush=True)
        yield


def _log_start(plan: RunPlan, size: gpt.Parameters, journal: log.Log, position: checkpoint.Position) -> None:
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    experts, flags = "", plan.flags
    if plan.experts.num_experts is not None:
        names += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
        experts = (
            f", {size.active} of them active per token ({flags.moe_router_topk} of "
            f"{flags.num_experts} experts)"
        )
    sizes = ", ".join(f"{name.replace('_', ' ')} {getattr(flags, name)}" for name in names)
    journal.say(
        f" {size.total} parameters, {size.without_embeddings} without embeddings{experts}; "
        f"{sizes}, data parallel size {plan.data_parallel_size}; "
        f"{_micro_batches(plan)} micro batches of {plan.micro_batch_size} x {plan.seq_length} tokens; "
        f"vocabulary {plan.vocabulary}, padded to {plan.padded_vocabulary}"
    )
    if plan.load_from:
        journal.say(f" loaded {plan.load_from}; resuming from iteration {position.iteration}")
        _say_changes(flags, journal)
    elif flags.load:
        journal.say(f" no checkpoint in {flags.load} yet: starting from scratch")
    if not plan.load_from and (note := initialize.random_numbers_of_device(flags)):
        journal.say(note)


def _micro_batches(plan: RunPlan) -> str:
    """Return the number of micro-batches per iteration.

    With a batch size ramp, return the first and last numbers.
    """
    first = "" if plan.ramp is None else f"{plan.micro_batches_of(plan.ramp.start)} to "
    return f"{first}{plan.micro_batches}"


def _say_changes(args: Flags, journal: log.Log) -> None:
    """Log how this run differs from the run that saved the checkpoint."""
    found = stock_checkpoints.existing(args.load, args.ckpt_step)
    if found.is_own:
        for line in resume_changes.since(found, args):
            journal.say(line)


def _report(plan: RunPlan, size: gpt.Parameters, outcome: Outcome, journal: log.Log) -> Summary:
    """Draw the plot, write the summary and return it."""
    summary = _summary(plan, size, outcome, journal.past(), journal.draw(), journal.path)
    if plan.saves.save and plan.rank == 0:
        path = Path(plan.saves.save) / "summary.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(asdict(summary), indent=1) + "\n")
    return summary


def _summary(
    plan: RunPlan,
    size: gpt.Parameters,
    outcome: Outcome,
    past: history.History,
    picture: Path | None,
    metrics: Path | None,
) -> Summary:
    device = devices.current()
    losses, throughputs = list(past.losses.values()), list(past.throughput.values())
    speed = outcome.samples_per_second()
    throughput = speed * plan.seq_length if speed else throughputs[-1] if throughputs else None
    operations = flops.of_step(plan.sizes) / plan.tokens
    saved = outcome.checkpoint or plan.load_from
    loss = outcome.validation_loss
    return Summary(
        device=device.name,
        backend=device.backend,
        simulated=device.simulated,
        upstream=f"megatron_core {plan.experts.megatron_version}",
        ledger=plugin.engine().ledger.summary(),
        world_size=plan.world_size,
        parameters=size.total,
        parameters_without_embeddings=size.without_embeddings,
        active_parameters=size.active,
        iterations=outcome.position.iteration,
        consumed_samples=outcome.position.train_samples,
        loss_first=losses[0] if losses else outcome.loss_first,
        loss_last=losses[-1] if losses else outcome.loss_last,
        validation_loss=loss,
        validation_perplexity=None if loss is None else log.perplexity_of(loss),
        validation_losses=outcome.validation_losses,
        test_loss=outcome.test_loss,
        tokens_per_second=throughput,
        tflops_per_device=throughput and throughput * operations / plan.world_size / 1e12,
        peak_memory_bytes=device.memory().peak,
        ended_by=outcome.ended_by,
        checkpoint=None if saved is None else str(saved),
        plot=None if picture is None else str(picture),
        metrics=None if metrics is None else str(metrics),
    )
