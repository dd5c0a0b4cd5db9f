"""Save checkpoints synchronously or asynchronously, and log when each one is complete."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from megatron_npu.pretrain.checkpoint import checkpoint_failures, checkpoint_files, checkpoints
from megatron_npu.pretrain.checkpoint.async_saves import AsyncSaves
from megatron_npu.pretrain.checkpoint.checkpoints import Position, State
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.model.gathered_parameters import gathered
from megatron_npu.pretrain.report.log import Log
from megatron_npu.pretrain.run.clock import Clock
from megatron_npu.pretrain.run.retention import Retention


class Saving:
    """Writes checkpoints to the ``--save`` folder.

    When used as a context manager, it abandons an unfinished checkpoint if the block raises an error.

    Args:
        plan: the plan of the run.
        state: the state to save.
        clock: the training clock, which is paused while a checkpoint is saved.
        log: the run's log.

    Attributes:
        last: the newest complete checkpoint written by this object.
    """

    def __init__(self, plan: RunPlan, state: State, clock: Clock, log: Log) -> None:
        self.plan, self.state, self.clock, self.log = plan, state, clock, log
        self.last: Path | None = None
        self._retention = Retention(plan.saves, log.say)
        self._writers = AsyncSaves(plan.stored, self._saved) if plan.saves.async_save else None

    def save(self, position: Position) -> None:
        """Save a checkpoint for the given position, or start to save it if --async-save is given.

        All ranks must call this.

        Raises:
            UnsavedError: this checkpoint or the previous one could not be written.
        """
        try:
            with self.clock.paused(), gathered(self.state.model, overlaps=self.plan.overlap_param_gather):
                if self._writers is not None:
                    return self._writers.begin(self.state, position)
                path = checkpoints.save(self.plan.stored, self.state, position)
        except checkpoint_failures.FAILURES as error:
            raise checkpoint_failures.unsaved(error, position.iteration, self.plan.flags.save) from error
        return self._saved(path, position.iteration)

    def save_last(self, position: Position) -> None:
        """Write the final checkpoint, if it has not been written yet, and wait until it is written.

        All ranks must call this.

        Raises:
            UnsavedError: see ``save``.
        """
        if self.last != checkpoint_files.directory(self.plan.flags.save, position.iteration):
            self.save(position)
            self.wait()

    def take_finished(self) -> None:
        """Complete a checkpoint after its background writers have finished. All ranks must call this.

        Raises:
            UnsavedError: the checkpoint could not be written.
        """
        if self._writers is not None and self._writers.busy:
            with self.clock.paused():
                self._writers.take_finished()

    def wait(self) -> None:
        """Wait for the background writers to finish. All ranks must call this.

        Raises:
            UnsavedError: the checkpoint could not be written.
        """
        if self._writers is not None:
            with self.clock.paused():
                self._writers.finish()

    def _saved(self, path: Path, iteration: int) -> None:
        """Record that the checkpoint of an iteration is complete.

        With --async-save, it may be an earlier iteration.
        """
        self.last = path
        self.log.say(f" saved {path}")
        self.log.write("checkpoint", iteration, {"path": str(path)})
        self._retention.after(path, iteration)

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writers is not None:
            self._writers.__exit__(kind, error, trace)
