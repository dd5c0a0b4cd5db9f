"""Write the log of a training run: lines in Megatron's format, JSON lines and TensorBoard curves.

The JSON lines are those of ``megatron-npu pretrain`` (``pretrain.report.history`` reads both), with samples
per second in addition to tokens, and evaluation metrics in addition to the loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatron_npu import devices
from megatron_npu.finetune.run.flag_parts import ReportFlags
from megatron_npu.pretrain.report.sinks import Sinks


@dataclass(frozen=True)
class Steps:
    """The iterations that one report covers.

    Attributes:
        losses: the loss of each iteration, averaged over all ranks.
        norms: the gradient norm of each iteration, or None if the update was skipped.
        seconds: total time without evaluation and saving.
        learning_rate: learning rate of the next iteration.
        tokens: the number of tokens of all iterations on all ranks, or 0 if it is unknown.
        scale: the loss scale; 1 without fp16.
    """

    losses: list[float]
    norms: list[float | None]
    seconds: float
    learning_rate: float
    tokens: int = 0
    scale: float = 1.0


class Report(Sinks):
    """The log of a run on rank 0, used as a context manager.

    Args:
        flags: the flags about the log.
        iteration: the first iteration.
        ledger: one line per switch with its effect.
    """

    def __init__(self, flags: ReportFlags, iteration: int, ledger: Sequence[str]) -> None:
        names = ("world_size", "train_iters", "global_batch_size", "seq_length", "task")
        facts = {name: getattr(flags, name) for name in names}
        self.flags = flags
        super().__init__(flags, iteration, {**facts, "switches": [*ledger]})
        for line in ledger:
            self.say(f" {line}")
        self.say(
            f" {flags.train_iters} iterations of {flags.global_batch_size} samples: {flags.num_microbatches} "
            f"x {flags.micro_batch_size} on {flags.data_parallel_size} "
            f"rank{'s' * (flags.data_parallel_size > 1)} ({devices.current().title}); {flags.epoch_iters} "
            "iterations per epoch"
        )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # the disk may be full: that is what has to be told then
                self.end(kind.__name__)
        self.close()

    def training(self, iteration: int, steps: Steps) -> None:
        """Report the iterations since the last call as a log line, a JSON object and points of TensorBoard
        curves.

        Args:
            iteration: number of the last iteration, counted from 1 since the start of the run.
            steps: the iterations.
        """
        if not self.on_rank_0:
            return
        row = self._row(iteration, steps)
        self.say(_line(self.flags, iteration, row))
        self.write("train", iteration, row)
        first = iteration - len(steps.losses) + 1
        for number, loss in enumerate(steps.losses):
            self.scalars(first + number, [("loss", loss)])
        names = ("learning_rate", "grad_norm", "loss_scale", "samples_per_second", "tokens_per_second")
        self.scalars(iteration, [(name.replace("_", "-"), row[name]) for name in names])

    def _row(self, iteration: int, steps: Steps) -> dict[str, Any]:
        device, flags = devices.current(), self.flags
        losses, norms, seconds, tokens = steps.losses, steps.norms, steps.seconds, steps.tokens
        memory, finite = device.memory(), [loss for loss in losses if math.isfinite(loss)]
        return {
            "consumed_samples": iteration * flags.global_batch_size,
            "epoch": iteration / flags.epoch_iters,
            "loss": sum(finite) / len(finite) if finite else math.nan,
            "losses": losses,
            "grad_norm": norms[-1],
            "grad_norms": norms,
            "learning_rate": steps.learning_rate,
            "loss_scale": steps.scale,
            "elapsed_ms": seconds / len(losses) * 1e3,
            "samples_per_second": flags.global_batch_size * len(losses) / seconds,
            "tokens_per_second": tokens / seconds if tokens else None,
            "peak_memory_bytes": memory.peak,
            "memory_bytes": memory.allocated,
            "utilization": device.utilization(),
            "skipped_iterations": sum(norm is None for norm in norms),
        }

    def evaluation(self, iteration: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Report an evaluation on the validation data."""
        self._found("validation", iteration, loss, metrics)

    def test(self, iteration: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Report the final evaluation on the test data."""
        self._found("test", iteration, loss, metrics)

    def _found(self, part: str, iteration: int, loss: float, metrics: Mapping[str, float]) -> None:
        title = "evaluation" if part == "validation" else part
        shown = "".join(f" {name}: {value:.4f} |" for name, value in metrics.items())
        self.say(f" {title} at iteration {iteration} | loss: {loss:.6E} |{shown}")
        self.write(part, iteration, {"loss": loss, "metrics": dict(metrics)})
        named = ((f"{name} {part}", value) for name, value in metrics.items())
        self.scalars(iteration, [(f"loss {part}", loss), *named])


def _line(flags: ReportFlags, iteration: int, row: dict[str, Any]) -> str:
    """Return the console line for a log event, with Megatron's field names where Megatron has the field."""
    norm = "" if row["grad_norm"] is None else f" grad norm: {row['grad_norm']:.3f} |"
    device = devices.current()
    note = f" {device.title} |" if device.simulated else ""
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{flags.train_iters:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} | epoch: {row['epoch']:.3f} |"
        f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
        f" samples per second: {row['samples_per_second']:.2f} |"
        f" learning rate: {row['learning_rate']:.6E} |"
        f" global batch size: {flags.global_batch_size:5d} |"
        f" loss: {row['loss']:.6E} | loss scale: {row['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" peak memory (MiB): {row['peak_memory_bytes'] / 2**20:.0f} |{note}"
    )
