"""What a run says: lines, JSON lines for the dashboard, TensorBoard, a progress bar, a picture; from rank 0.

The JSON lines are those of ``megatron-npu pretrain`` (``training.history`` reads both), with samples per
second beside tokens, and metrics beside the loss of an evaluation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.training import history
from megatron_npu.training.json_lines import JsonLines


class Report:
    """The sinks of a run, a context manager. On ranks other than 0 every method is silent.

    Args:
        args: the flags.
        iteration: where the run begins.
        ledger: what each switch did, one line each.
    """

    def __init__(self, args: Namespace, iteration: int, ledger: Sequence[str]) -> None:
        self.args = args
        self.on_rank_0 = args.rank == 0
        self.path = metrics_path(args) if self.on_rank_0 else None
        self._lines = JsonLines(self.path)
        self._iteration = iteration
        self._board, self._bar = self._open_board(), self._open_bar(iteration)
        self._begin(iteration, ledger)

    def _open_board(self) -> Any:
        if not self.on_rank_0 or not self.args.tensorboard_dir:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(devices.board_folder(self.args.tensorboard_dir))

    def _open_bar(self, iteration: int) -> Any:
        if not self.on_rank_0 or not (sys.stdout.isatty() and sys.stderr.isatty()):
            return None
        from tqdm import tqdm

        return tqdm(total=self.args.train_iters, initial=iteration, unit="it", dynamic_ncols=True)

    def _begin(self, iteration: int, ledger: Sequence[str]) -> None:
        args = self.args
        names = ("world_size", "train_iters", "global_batch_size", "seq_length", "task")
        facts = {name: getattr(args, name) for name in names}
        self.write("start", iteration, {"device": devices.current().title, **facts, "switches": [*ledger]})
        for line in ledger:
            self.say(f" {line}")
        self.say(
            f" {args.train_iters} iterations of {args.global_batch_size} samples: "
            f"{args.num_microbatches} x {args.micro_batch_size} on {args.data_parallel_size} "
            f"rank{'s' * (args.data_parallel_size > 1)} ({devices.current().title}); "
            f"{args.epoch_iters} iterations are an epoch"
        )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # the disk may be full: that is what has to be told then
                self.end(kind.__name__)
        for sink in (self._board, self._bar):
            if sink is not None:
                sink.close()

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
        """Append one JSON object."""
        self._iteration = iteration
        if self.on_rank_0:
            self._lines.write(event, iteration, values)

    def scalars(self, iteration: int, values: Iterable[tuple[str, float | None]]) -> None:
        """Give numbers to TensorBoard."""
        if self._board is not None:
            for name, value in values:
                if value is not None:
                    self._board.add_scalar(name, value, iteration)

    def training(
        self,
        iteration: int,
        losses: list[float],
        norms: list[float | None],
        seconds: float,
        *,
        learning_rate: float,
        tokens: int = 0,
        scale: float = 1.0,
    ) -> None:
        """Report the iterations since the last time: a line, a JSON object and TensorBoard's curves.

        Args:
            iteration: the last of them, counted from 1 since the run first began.
            losses: of each, the mean over all ranks.
            norms: of each, the gradient's; None where the update was left out.
            seconds: that all took together, evaluation and saving left out.
            learning_rate: of the next one.
            tokens: of all ranks in all of them; 0: nobody knows.
            scale: the loss scale; 1 without fp16.
        """
        if not self.on_rank_0:
            return
        row = self._row(iteration, losses, norms, seconds, learning_rate, tokens, scale)
        self.say(_line(self.args, iteration, row))
        self.write("train", iteration, row)
        first = iteration - len(losses) + 1
        for number, loss in enumerate(losses):
            self.scalars(first + number, [("loss", loss)])
        names = ("learning_rate", "grad_norm", "loss_scale", "samples_per_second", "tokens_per_second")
        self.scalars(iteration, [(name.replace("_", "-"), row[name]) for name in names])

    def _row(
        self,
        iteration: int,
        losses: list[float],
        norms: list[float | None],
        seconds: float,
        learning_rate: float,
        tokens: int,
        scale: float,
    ) -> dict[str, Any]:
        device, args = devices.current(), self.args
        memory, finite = device.memory(), [loss for loss in losses if math.isfinite(loss)]
        return {
            "consumed_samples": iteration * args.global_batch_size,
            "epoch": iteration / args.epoch_iters,
            "loss": sum(finite) / len(finite) if finite else math.nan,
            "losses": losses,
            "grad_norm": norms[-1],
            "grad_norms": norms,
            "learning_rate": learning_rate,
            "loss_scale": scale,
            "elapsed_ms": seconds / len(losses) * 1e3,
            "samples_per_second": args.global_batch_size * len(losses) / seconds,
            "tokens_per_second": tokens / seconds if tokens else None,
            "peak_memory_bytes": memory.peak,
            "memory_bytes": memory.allocated,
            "utilization": device.utilization(),
            "skipped_iterations": sum(norm is None for norm in norms),
        }

    def evaluation(self, iteration: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Report an evaluation on the validation data."""
        shown = "".join(f" {name}: {value:.4f} |" for name, value in metrics.items())
        self.say(f" evaluation at iteration {iteration} | loss: {loss:.6E} |{shown}")
        self.write("validation", iteration, {"loss": loss, "metrics": dict(metrics)})
        named = ((f"{name} validation", value) for name, value in metrics.items())
        self.scalars(iteration, [("loss validation", loss), *named])

    def test(self, iteration: int, loss: float) -> None:
        """Report the evaluation at the end on data that nothing else has seen."""
        self.say(f" test at iteration {iteration} | loss: {loss:.6E} |")
        self.write("test", iteration, {"loss": loss})
        self.scalars(iteration, [("loss test", loss)])

    def draw(self) -> Path | None:
        """Write the picture of the run up to here, if there is to be one; return its path.

        A picture that cannot be written is no reason to end a run: that is said, and the run goes on.
        """
        if self.path is None or not self._draws():
            return None
        past = history.read(self.path)
        path = Path(self.args.save or self.args.tensorboard_dir or self.path.parent) / "training.png"
        if not past.losses:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            history.draw(past, path)
        except OSError as error:
            self.say(f" {path} could not be written: {error.strerror}")
            return None
        return path

    def _draws(self) -> bool:
        if self.args.plot is None:
            return bool(self.args.save) and importlib.util.find_spec("matplotlib") is not None
        return self.args.plot

    def end(self, reason: str) -> None:
        """Note that the run has ended: why, or the kind of the error that ended it."""
        self.write("end", self._iteration, {"ended_by": reason})


def metrics_path(args: Namespace) -> Path | None:
    """Return where the JSON lines go, None without a place for them."""
    if args.json_log:
        return Path(args.json_log)
    directory = args.save or args.tensorboard_dir
    return Path(directory) / "metrics.jsonl" if directory else None


def _line(args: Namespace, iteration: int, row: dict[str, Any]) -> str:
    """Return the console's line for one log event: Megatron's fields where there is one."""
    norm = "" if row["grad_norm"] is None else f" grad norm: {row['grad_norm']:.3f} |"
    device = devices.current()
    note = f" {device.title} |" if device.simulated else ""
    return (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {row['consumed_samples']:12d} | epoch: {row['epoch']:.3f} |"
        f" elapsed time per iteration (ms): {row['elapsed_ms']:.1f} |"
        f" samples per second: {row['samples_per_second']:.2f} |"
        f" learning rate: {row['learning_rate']:.6E} |"
        f" global batch size: {args.global_batch_size:5d} |"
        f" loss: {row['loss']:.6E} | loss scale: {row['loss_scale']:.1f} |{norm}"
        f" number of skipped iterations: {row['skipped_iterations']:3d} |"
        f" peak memory (MiB): {row['peak_memory_bytes'] / 2**20:.0f} |{note}"
    )
