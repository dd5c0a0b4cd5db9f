"""Write the log of a pre-training run: lines in Megatron's format, JSON lines and TensorBoard curves.

Between two log events a step costs only two Python appends: losses stay on the device, and one reduction per
interval (``loss.means``) gathers them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron_npu import devices
from megatron_npu.devices.rows import Rows
from megatron_npu.pretrain.flags.plan_parts import LogFlags
from megatron_npu.pretrain.report import flops
from megatron_npu.pretrain.report.drawn_texts import Text
from megatron_npu.pretrain.report.rank_times import Place
from megatron_npu.pretrain.report.sinks import Sinks
from megatron_npu.pretrain.run.losses.expert_losses import LOSSES
from megatron_npu.pretrain.run.losses.prediction_losses import PREFIX

_CURVES = "learning_rate grad_norm loss_scale tokens_per_second tflops_per_device utilization".split()


@dataclass
class Interval:
    """The values recorded since the last report.

    Attributes:
        losses: for each iteration [2], this process's sum of losses and number of tokens.
        norms: gradient norm of each iteration; None if it was skipped.
        batches: number of samples of each iteration, over all ranks.
        skipped: number of iterations whose update was skipped.
    """

    losses: Rows = field(default_factory=Rows)
    norms: list[float | None] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True)
class Steps:
    """The values to report for the iterations of one interval.

    Attributes:
        samples: the number of training samples that all ranks have used since the start of the run.
        interval: the data recorded in the interval.
        losses: the mean training losses over all processes, in nats per token (``loss.means``).
        seconds: the total training time, without evaluation and saving.
        learning_rate: the learning rate of the last iteration.
        scale: the loss scale after the last iteration; 1 without fp16.
    """

    samples: int
    interval: Interval
    losses: list[float]
    seconds: float
    learning_rate: float
    scale: float


class Log(Sinks):
    """The log of a run, which rank 0 writes.

    Args:
        flags: what the log lines contain.
        iteration: the first iteration.
    """

    def __init__(self, flags: LogFlags, iteration: int) -> None:
        names = ("world_size", "train_iters", "global_batch_size", "seq_length")
        super().__init__(flags, iteration, {name: getattr(flags, name) for name in names})
        self.flags = flags

    def training(
        self,
        iteration: int,
        steps: Steps,
        *,
        of_ranks: Mapping[int, float] | None = None,
        of_experts: Mapping[str, list[float]] | None = None,
        of_predictions: Mapping[str, float] | None = None,
        milliseconds: Sequence[float] = (),
    ) -> None:
        """Report the iterations of an interval as a log line, a JSON object and points of TensorBoard curves.

        Args:
            iteration: number of the last iteration, counted from 1 since the start of the run.
            steps: the iterations.
            of_ranks: each rank's own mean loss (``loss.of_ranks``), if it is reported too.
            of_experts: losses of each layer with experts (``ExpertLosses.take``), if they are reported.
            of_predictions: losses of multi-token prediction (``PredictionLosses.take``), if they are
                reported.
            milliseconds: forward time of each rank (``RankTimes.take``).
        """
        if not self.on_rank_0:
            return
        of_experts, of_predictions = of_experts or {}, of_predictions or {}
        row = _row(self.flags, steps) | self._of_layers(of_experts) | dict(of_predictions)
        self.say(line(self.flags, iteration, row))
        if of_ranks is not None:
            self._of_ranks(iteration, of_ranks)
            row["losses_of_ranks"] = {str(rank): loss for rank, loss in of_ranks.items()}
        if milliseconds:
            row["forward_ms_of_ranks"] = [round(each, 3) for each in milliseconds]
        self.write("train", iteration, row)
        self._curves(iteration, steps.losses, row, [*_CURVES, *of_experts, *of_predictions])
        if "global_batch_size" in row:
            self.scalars(iteration, [("batch-size", row["global_batch_size"])])

    def _of_layers(self, of_experts: Mapping[str, list[float]]) -> dict[str, Any]:
        """Return the mean of each expert loss over the layers and, if requested, the loss of each layer."""
        row: dict[str, Any] = {name: sum(layers) / len(layers) for name, layers in of_experts.items()}
        if self.flags.moe_per_layer_logging:
            row |= {f"{name}_of_layers": layers for name, layers in of_experts.items()}
        return row

    def places(self, iteration: int, places: Sequence[Place]) -> None:
        """Report the machine and pipeline stage of each rank, if the run has more than one rank."""
        if places:
            hosts, stages = [place.host for place in places], [place.stage for place in places]
            self.write("ranks", iteration, {"hosts": hosts, "stages": stages})

    def _of_ranks(self, iteration: int, losses: Mapping[int, float]) -> None:
        for rank, loss in losses.items():
            self.say(
                f" [rank {rank}] iteration {iteration:8d}/{self.flags.train_iters:8d} | lm loss: {loss:.6E} |"
            )
            self.scalars(iteration, [(f"lm loss of rank {rank}", loss)])

    def _curves(self, iteration: int, losses: list[float], row: dict[str, Any], names: list[str]) -> None:
        first = iteration - len(losses) + 1
        for number, loss in enumerate(losses):
            self.scalars(first + number, [("lm loss", loss)])
        self.scalars(iteration, [(name.replace("_", "-"), row[name]) for name in names])

    def validation(
        self,
        iteration: int,
        loss: float,
        trained: float | None = None,
        of_sets: Sequence[tuple[str, float]] = (),
    ) -> None:
        """Report the results of an evaluation.

        Args:
            iteration: the iteration after which the model was evaluated.
            loss: the mean over the validation samples, in nats per token; its perplexity is reported too.
                With several sets, this is the mean of their losses.
            trained: the mean loss of training samples, if they were evaluated.
            of_sets: the prefix and loss of each set, if there are several sets.
        """
        for number, (name, own) in enumerate(of_sets):
            self.say(
                f" validation-{number} loss at iteration {iteration} | lm loss value: {own:.6E} | "
                f"lm loss PPL: {perplexity_of(own):.6E} | {name}"
            )
            self.scalars(iteration, [(f"lm loss validation-{number}", own)])
        perplexity = perplexity_of(loss)
        compared = "" if trained is None else f" training samples' lm loss value: {trained:.6E} |"
        self.say(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |{compared}"
        )
        row: dict[str, Any] = {"loss": loss, "perplexity": perplexity}
        if of_sets:
            row["sets"] = [{"data": name, "loss": own} for name, own in of_sets]
        curves = [("lm loss validation", loss), ("lm loss validation perplexity", perplexity)]
        if trained is not None:
            row["training_loss"] = trained
            curves.append(("lm loss of training samples, evaluated", trained))
        self.write("validation", iteration, row)
        self.scalars(iteration, curves)

    def sample(self, iteration: int, text: Text) -> None:
        """Report a generated text, on a single console line even if the text contains line breaks."""
        self.say(f" sample at iteration {iteration} | {_printable(text.prompt + text.added)}")
        self.write("sample", iteration, {"prompt": text.prompt, "text": text.added})
        if self._board is not None:
            quoted = "\n".join(f"    {line}" for line in (text.prompt + text.added).splitlines())
            self._board.add_text(f"sample: {text.prompt}", quoted, iteration)  # Markdown: as it is

    def test(self, iteration: int, loss: float) -> None:
        """Report the final evaluation on the test data, as ``validation`` does for validation data."""
        perplexity = perplexity_of(loss)
        self.say(
            f" validation loss at iteration {iteration} on test set | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |"
        )
        self.write("test", iteration, {"loss": loss, "perplexity": perplexity})
        self.scalars(iteration, [("lm loss test", loss), ("lm loss test perplexity", perplexity)])


def _printable(text: str) -> str:
    """Escape line breaks, control codes and unprintable characters for printing a text on the console."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def perplexity_of(loss: float) -> float:
    """Return the perplexity exp(loss), limited to exp(20) as in Megatron."""
    return math.exp(min(20.0, loss))


def _row(flags: LogFlags, steps: Steps) -> dict[str, Any]:
    losses, interval, seconds = steps.losses, steps.interval, steps.seconds
    each, memory = seconds / len(losses), devices.current().memory()
    together = sum(interval.batches)
    counted = [loss for loss in losses if math.isfinite(loss)]
    return {
        "consumed_samples": steps.samples,
        **({"global_batch_size": interval.batches[-1]} if flags.ramps else {}),
        **({} if not flags.epoch_samples else {"epoch": steps.samples / flags.epoch_samples}),
        "loss": sum(counted) / len(counted) if counted else math.nan,
        "losses": losses,
        "grad_norm": interval.norms[-1],
        "grad_norms": interval.norms,
        "learning_rate": steps.learning_rate,
        "loss_scale": steps.scale,
        "elapsed_ms": each * 1e3,
        "tokens_per_second": together * flags.seq_length / seconds,
        "tflops_per_device": _operations(flags)
        * (together / flags.global_batch_size / seconds / flags.world_size / 1e12),
        "peak_memory_bytes": memory.peak,
        "memory_bytes": memory.allocated,
        "utilization": devices.current().utilization(),
        "skipped_iterations": interval.skipped,
        "nan_iterations": len(losses) - len(counted),
    }


def _operations(flags: LogFlags) -> float:
    return 0.0 if flags.sizes is None else flops.of_step(flags.sizes)


def _spaced(name: str) -> str:
    """Return the name of a loss as upstream writes it, such as ``load balancing loss`` or ``mtp_1 loss``."""
    return PREFIX * name.startswith(PREFIX) + name.removeprefix(PREFIX).replace("_", " ")


def line(flags: LogFlags, iteration: int, row: dict[str, Any]) -> str:
    """Return the console line for an interval, with Megatron's fields followed by throughput and memory."""
    norm = "" if row["grad_norm"] is None else f" grad norm: {row['grad_norm']:.3f} |"
    device = devices.current()
    note = f" {device.title} |" if device.simulated else ""
    busy = "" if row["utilization"] is None else f" device utilization: {row['utilization']:.0%} |"
    epoch = f" epoch: {row['epoch']:.3f}/{flags.epochs} |" if "epoch" in row else ""
    names = [*LOSSES, *(name for name in row if name.startswith(PREFIX))]
    further = "".join(f" {_spaced(name)}: {row[name]:.6E} |" for name in names if name in row)
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{flags.train_iters:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} |{epoch}"
        f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
        f" throughput per device (TFLOP/s): {row['tflops_per_device']:.4g} |"
        f" tokens per second: {row['tokens_per_second']:.1f} |"
        f" learning rate: {row['learning_rate']:.6E} |"
        f" global batch size: {row.get('global_batch_size', flags.global_batch_size):5d} |"
        f" lm loss: {row['loss']:.6E} |{further} loss scale: {row['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" number of nan iterations: {row['nan_iterations']:3d} |"
        f" peak memory (MiB): {row['peak_memory_bytes'] / 2**20:.0f} |{busy}{note}"
    )
