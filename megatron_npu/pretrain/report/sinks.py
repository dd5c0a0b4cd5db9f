"""Manage where rank 0 reports a run: console, JSON lines, TensorBoard, Weights & Biases, progress bar and
plot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.pretrain.flags.plan_parts import SinkFlags
from megatron_npu.pretrain.report import history, superseded, wandb_run
from megatron_npu.pretrain.report.json_lines import JsonLines

ENDS = ("iterations", "exit-interval", "exit-duration", "signal")  # of a run that has not failed


class Sinks:
    """The places to which a run is reported. On ranks other than rank 0, no method has an effect.

    Args:
        flags: the destinations.
        iteration: the first iteration.
        start: values to add to the first JSON object, besides the device.
    """

    def __init__(self, flags: SinkFlags, iteration: int, start: dict[str, Any]) -> None:
        self._places = flags
        self.on_rank_0 = flags.rank == 0
        self._went_well = False
        self.path = metrics_path(flags) if self.on_rank_0 else None
        if self.path is not None:
            superseded.put_aside(self.path, iteration)
        self._reader = None if self.path is None else history.Reader(self.path)
        self._lines = JsonLines(self.path)
        self._board, self._bar = self._open_board(iteration), self._open_bar(iteration)
        self._wandb = wandb_run.WandbRun(flags.wandb) if flags.wandb and self.on_rank_0 else None
        self.write("start", iteration, {"device": devices.current().title, **start})

    def _open_board(self, iteration: int) -> Any:
        if not self.on_rank_0 or not self._places.tensorboard_dir:
            return None
        from torch.utils.tensorboard import SummaryWriter

        # what a killed run has written after its checkpoint is not shown beside what comes now
        folder = devices.board_folder(self._places.tensorboard_dir)
        return SummaryWriter(folder, purge_step=iteration + 1)

    def _open_bar(self, iteration: int) -> Any:
        if not self.on_rank_0 or not (sys.stdout.isatty() and sys.stderr.isatty()):
            return None
        from tqdm import tqdm

        return tqdm(total=self._places.train_iters, initial=iteration, unit="it", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print a line on the console."""
        if not self.on_rank_0:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def tick(self) -> None:
        """Advance the progress bar by one iteration."""
        if self._bar is not None:
            self._bar.update()

    def write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        """Append one JSON object with the name of the event, its iteration and its values.

        NaN and infinite values become null.
        """
        self._iteration = iteration
        self._lines.write(event, iteration, values)

    def scalars(self, iteration: int, values: Iterable[tuple[str, float | None]]) -> None:
        """Send values to TensorBoard and Weights & Biases.

        None values are skipped.
        """
        numbers = {name: value for name, value in values if value is not None}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(iteration, numbers)

    def past(self) -> history.History:
        """Return the history of the run and of the runs from which it was resumed.

        The history is empty without a JSON-lines file.
        """
        if self._reader is None:
            return history.History()
        self._reader.update()
        return self._reader.history

    def draw(self) -> Path | None:
        """Plot the history of the run if plots are enabled.

        Return the path of the plot, or None.

        If the plot cannot be written, an error is logged and the run continues.
        """
        folder = self._places.save or self._places.tensorboard_dir
        if not (self._places.plot and folder) or not (past := self.past()).losses:
            return None
        path = Path(folder) / "training.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            history.draw(past, path)
        except OSError as error:
            self.say(f" {path} could not be written: {error.strerror}")
            return None
        return path

    def end(self, reason: str) -> None:
        """Record that the run has ended, and the reason or the type of the error."""
        self.write("end", self._iteration, {"ended_by": reason})
        self._went_well = reason in ENDS

    def close(self) -> None:
        """Close all places to which the run is reported."""
        for sink in (self._board, self._bar):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.close(went_well=self._went_well)


def metrics_path(flags: SinkFlags) -> Path | None:
    """Return the path of the JSON-lines file, or None if the run does not write one."""
    if flags.json_log:
        return Path(flags.json_log)
    directory = flags.save or flags.tensorboard_dir
    return Path(directory) / "metrics.jsonl" if directory else None
