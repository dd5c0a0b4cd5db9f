"""What a run says: lines like Megatron's, JSON lines, TensorBoard, a progress bar; all from rank 0.

Between two log events a step costs two Python appends: losses stay on the device, and one reduction for the
whole interval (``loss.means``) brings them together.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.training import flops, history
from megatron_npu.training.expert_losses import LOSSES
from megatron_npu.training.json_lines import JsonLines
from megatron_npu.training.samples import Text


@dataclass
class Interval:
    """What happened since the last log event.

    Attributes:
        losses: for each iteration [2], this process's sum of losses and number of tokens.
        norms: the norm of each iteration's gradient; None where there was none.
        skipped: iterations whose update was left out.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: int = 0


class Log:
    """The sinks of a run. On ranks other than 0 every method is silent.

    Args:
        args: what ``validation.check`` returned.
        iteration: where the run begins.
    """

    def __init__(self, args: Namespace, iteration: int) -> None:
        self.args = args
        self.on_rank_0 = args.rank == 0
        self.path = metrics_path(args) if self.on_rank_0 else None
        self._reader = None if self.path is None else history.Reader(self.path)
        self._board = self._bar = None
        self._lines = JsonLines(self.path)
        if self.on_rank_0 and args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(devices.board_folder(args.tensorboard_dir))
        if self.on_rank_0 and sys.stdout.isatty() and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=args.train_iters, initial=iteration, unit="it", dynamic_ncols=True)
        self._iteration = iteration
        self.write("start", iteration, _of_the_run(args))

    def say(self, text: str) -> None:
        """Print a line."""
        if not self.on_rank_0:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def tick(self) -> None:
        """Move the bar by one iteration."""
        if self._bar is not None:
            self._bar.update()

    def write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        """Append one JSON object: the event, its iteration and values; numbers that are not are null."""
        self._iteration = iteration
        self._lines.write(event, iteration, values)

    def scalars(self, iteration: int, values: Iterable[tuple[str, float]]) -> None:
        """Give numbers to TensorBoard."""
        if self._board is not None:
            for name, value in values:
                self._board.add_scalar(name, value, iteration)

    def training(
        self,
        iteration: int,
        samples: int,
        interval: Interval,
        losses: list[float],
        seconds: float,
        learning_rate: float,
        scale: float,
        of_ranks: Mapping[int, float] | None = None,
        of_experts: Mapping[str, list[float]] | None = None,
    ) -> None:
        """Report the iterations of an interval: a line, a JSON object and TensorBoard's curves.

        Args:
            iteration: the last of them, counted from 1 since the run first began.
            samples: training samples that all ranks together have used since then.
            interval: what happened in them.
            losses: their mean training losses over all processes, in nats a token (``loss.means``).
            seconds: that all of them took together, evaluation and saving left out.
            learning_rate: of the last one.
            scale: the loss scale after the last one; 1 without fp16.
            of_ranks: each rank's own mean loss (``loss.of_ranks``), to be reported, too.
            of_experts: the losses of each layer with experts (``expert_losses.take``), likewise.
        """
        if not self.on_rank_0:
            return
        row = _row(self.args, samples, interval, losses, seconds, learning_rate, scale)
        row |= {name: sum(layers) / len(layers) for name, layers in (of_experts or {}).items()}
        if self.args.moe_per_layer_logging:
            row |= {f"{name}_of_layers": layers for name, layers in (of_experts or {}).items()}
        self.say(line(self.args, iteration, row))
        for rank, loss in (of_ranks or {}).items():
            self.say(
                f" [rank {rank}] iteration {iteration:8d}/{self.args.train_iters:8d} | lm loss: {loss:.6E} |"
            )
            self.scalars(iteration, [(f"lm loss of rank {rank}", loss)])
        if of_ranks is not None:
            row["losses_of_ranks"] = {str(rank): loss for rank, loss in of_ranks.items()}
        self.write("train", iteration, row)
        first = iteration - len(losses) + 1
        for number, loss in enumerate(losses):
            self.scalars(first + number, [("lm loss", loss)])
        names = (
            "learning_rate",
            "grad_norm",
            "loss_scale",
            "tokens_per_second",
            "tflops_per_device",
            "utilization",
            *(of_experts or {}),
        )
        named = ((name.replace("_", "-"), row[name]) for name in names)
        self.scalars(iteration, [(name, value) for name, value in named if value is not None])

    def validation(self, iteration: int, loss: float, trained: float | None = None) -> None:
        """Report an evaluation.

        Args:
            iteration: after which the model was evaluated.
            loss: mean over the validation samples, in nats a token; its perplexity is reported, too.
            trained: the same over samples of training, if they were evaluated.
        """
        perplexity = perplexity_of(loss)
        compared = "" if trained is None else f" training samples' lm loss value: {trained:.6E} |"
        self.say(
            f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |{compared}"
        )
        row = {"loss": loss, "perplexity": perplexity}
        curves = [("lm loss validation", loss), ("lm loss validation perplexity", perplexity)]
        if trained is not None:
            row["training_loss"] = trained
            curves.append(("lm loss of training samples, evaluated", trained))
        self.write("validation", iteration, row)
        self.scalars(iteration, curves)

    def sample(self, iteration: int, text: Text) -> None:
        """Report a text that the model has drawn; on the console in one line, whatever it holds."""
        self.say(f" sample at iteration {iteration} | {_printable(text.prompt + text.added)}")
        self.write("sample", iteration, {"prompt": text.prompt, "text": text.added})
        if self._board is not None:
            quoted = "\n".join(f"    {line}" for line in (text.prompt + text.added).splitlines())
            self._board.add_text(f"sample: {text.prompt}", quoted, iteration)  # Markdown: as it is

    def test(self, iteration: int, loss: float) -> None:
        """Report the evaluation at the end on data that nothing else has seen, as ``validation`` does."""
        perplexity = perplexity_of(loss)
        self.say(
            f" validation loss at iteration {iteration} on test set | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |"
        )
        self.write("test", iteration, {"loss": loss, "perplexity": perplexity})
        self.scalars(iteration, [("lm loss test", loss), ("lm loss test perplexity", perplexity)])

    def past(self) -> history.History:
        """Return what has been logged of the run and of those that it went on from; empty without a file."""
        if self._reader is None:
            return history.History()
        self._reader.update()
        return self._reader.history

    def draw(self) -> Path | None:
        """Write the picture of the run up to here, if there is to be one; return its path.

        A picture that cannot be written is no reason to end a run: that is said, and the run goes on.
        """
        if not self.args.plot or not (past := self.past()).losses:
            return None
        path = Path(self.args.save or self.args.tensorboard_dir) / "training.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            history.draw(past, path)
        except OSError as error:
            self.say(f" {path} could not be written: {error.strerror}")
            return None
        return path

    def end(self, reason: str) -> None:
        """Note that the run has ended: why, or the kind of the error that ended it."""
        self.write("end", self._iteration, {"ended_by": reason})

    def close(self) -> None:
        """Close the sinks."""
        for sink in (self._board, self._bar):
            if sink is not None:
                sink.close()


def metrics_path(args: Namespace) -> Path | None:
    """Return where the JSON lines go, None without a place for them."""
    if args.json_log:
        return Path(args.json_log)
    directory = args.save or args.tensorboard_dir
    return Path(directory) / "metrics.jsonl" if directory else None


def _of_the_run(args: Namespace) -> dict[str, Any]:
    names = ("world_size", "train_iters", "global_batch_size", "seq_length")
    return {"device": devices.current().title, **{name: getattr(args, name) for name in names}}


def _printable(text: str) -> str:
    """Return a text for the console: escapes for line ends, control codes and what it cannot show."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def perplexity_of(loss: float) -> float:
    """Return exp(loss), with Megatron's limit of exp(20)."""
    return math.exp(min(20.0, loss))


def _row(
    args: Namespace,
    samples: int,
    interval: Interval,
    losses: list[float],
    seconds: float,
    learning_rate: float,
    scale: float,
) -> dict[str, Any]:
    each, memory = seconds / len(losses), devices.current().memory()
    counted = [loss for loss in losses if math.isfinite(loss)]
    return {
        "consumed_samples": samples,
        **({} if args.epochs is None else {"epoch": samples / args.epoch_samples}),
        "loss": sum(counted) / len(counted) if counted else math.nan,
        "losses": losses,
        "grad_norm": interval.norms[-1],
        "grad_norms": interval.norms,
        "learning_rate": learning_rate,
        "loss_scale": scale,
        "elapsed_ms": each * 1e3,
        "tokens_per_second": args.global_batch_size * args.seq_length / each,
        "tflops_per_device": flops.of_step(args) / each / args.world_size / 1e12,
        "peak_memory_bytes": memory.peak,
        "memory_bytes": memory.allocated,
        "utilization": devices.current().utilization(),
        "skipped_iterations": interval.skipped,
        "nan_iterations": len(losses) - len(counted),
    }


def line(args: Namespace, iteration: int, row: dict[str, Any]) -> str:
    """Return the console's line for one log event: Megatron's fields, then throughput and memory."""
    norm = "" if row["grad_norm"] is None else f" grad norm: {row['grad_norm']:.3f} |"
    device = devices.current()
    note = f" {device.title} |" if device.simulated else ""
    busy = "" if row["utilization"] is None else f" device utilization: {row['utilization']:.0%} |"
    epoch = f" epoch: {row['epoch']:.3f}/{args.epochs} |" if "epoch" in row else ""
    experts = "".join(f" {name.replace('_', ' ')}: {row[name]:.6E} |" for name in LOSSES if name in row)
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} |{epoch}"
        f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
        f" throughput per device (TFLOP/s): {row['tflops_per_device']:.4g} |"
        f" tokens per second: {row['tokens_per_second']:.1f} |"
        f" learning rate: {row['learning_rate']:.6E} |"
        f" global batch size: {args.global_batch_size:5d} |"
        f" lm loss: {row['loss']:.6E} |{experts} loss scale: {row['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" number of nan iterations: {row['nan_iterations']:3d} |"
        f" peak memory (MiB): {row['peak_memory_bytes'] / 2**20:.0f} |{busy}{note}"
    )
