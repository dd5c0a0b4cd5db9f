"""Implement ``--async-save``: write one checkpoint at a time while training continues.

megatron-core copies the state to the host and forks a process on each rank to write it. When all of these
processes have ended, the ranks complete the checkpoint together; until then it does not have its final name
and cannot be loaded.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megatron_npu import watchdog
from megatron_npu.pretrain.checkpoint import (
    checkpoint_failures,
    checkpoint_files,
    checkpoint_folder,
    checkpoints,
)
from megatron_npu.pretrain.checkpoint.checkpoints import Position, State
from megatron_npu.pretrain.flags.checkpoint_parts import StoreFlags

# RuntimeError is megatron-core's where a writer was killed: it left no result.
_FAILURES = (*checkpoint_failures.FAILURES, RuntimeError)


class AsyncSaves:
    """The checkpoint that is being written in the background, if there is one.

    When used as a context manager, it abandons the checkpoint if the block raises an error.

    Args:
        flags: the folder of the checkpoints, and what is stored in them.
        saved: called on every rank when a checkpoint is complete, with its directory and iteration.
    """

    def __init__(self, flags: StoreFlags, saved: Callable[[Path, int], None]) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._flags, self._saved = flags, saved
        self._queue = AsyncCallsQueue()
        self._written: Position | None = None  # where the run stood

    @property
    def busy(self) -> bool:
        """True if a checkpoint is being written."""
        return self._written is not None

    @watchdog.phase(watchdog.SAVING)
    def begin(self, state: State, position: Position) -> None:
        """Complete the previous checkpoint, and start to write the checkpoint for ``position``.

        All ranks must call this.

        Raises:
            UnsavedError: the previous checkpoint could not be written.
            OSError: this checkpoint cannot be written.
        """
        self.finish()
        self._written = position
        part = checkpoint_folder.begin(self._flags.save, position.iteration)
        self._queue.schedule_async_request(checkpoints.begin_async(self._flags, state, position, part))

    def take_finished(self) -> None:
        """Complete the background checkpoint if all ranks have written their parts.

        All ranks must call this.

        Raises:
            UnsavedError: the checkpoint could not be written.
        """
        self._complete(blocking=False)

    def finish(self) -> None:
        """Wait until the background checkpoint is written, and complete it. All ranks must call this.

        Raises:
            UnsavedError: the checkpoint could not be written.
        """
        self._complete(blocking=True)

    @watchdog.phase(watchdog.SAVING)  # also at the run's end, and before it goes back to an earlier one
    def _complete(self, *, blocking: bool) -> None:
        position, root = self._written, self._flags.save
        if position is None:
            return
        place = checkpoint_files.directory(root, position.iteration)
        try:
            if not self._queue.maybe_finalize_async_calls(blocking):
                return
            checkpoints.complete(self._flags, position, checkpoint_folder.hidden(root, position.iteration))
            checkpoint_folder.finish(root, position.iteration)
        except _FAILURES as error:
            raise checkpoint_failures.unsaved(error, position.iteration, root) from error
        self._written = None
        self._saved(place, position.iteration)

    def __enter__(self) -> AsyncSaves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop this rank's background writer if the run ends with an error.

        Other ranks may no longer exist.
        """
        if kind is None or self._written is None:
            return
        for call in self._queue.async_calls:
            process = call.async_caller.process
            if process is not None:
                process.kill()
                process.join()
        _forget_results()
        checkpoint_folder.discard(self._flags.save, self._written.iteration)


def _forget_results() -> None:
    """Discard the results of a background writer that was stopped.

    The next checkpoint would otherwise include them.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async as writers

    results = (
        getattr(writers, "get_write_results_queue", None) or writers._get_write_results_queue
    )  # until 0.16
    with contextlib.suppress(queue.Empty):
        while True:
            results().get_nowait()
