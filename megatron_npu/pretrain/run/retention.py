"""Decide which checkpoints to keep after each save (``--save-retain-interval``, ``--save-keep-last``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, removal
from megatron_npu.pretrain.checkpoint import checkpoint_files, whole_checkpoints
from megatron_npu.pretrain.flags.plan_parts import SaveFlags


class Retention:
    """Removes checkpoints that need not be kept, on rank 0.

    With --save-per-machine, one rank of each machine removes them.

    The checkpoint that was just saved is always kept. Without --save-keep-last, only the previous checkpoint
    is removed, as in upstream.

    Args:
        flags: which checkpoints are kept.
        say: prints a line.
    """

    def __init__(self, flags: SaveFlags, say: Callable[[str], None]) -> None:
        self._keep, self._every = flags.save_keep_last, flags.save_retain_interval
        self._root, self._say = flags.save, say
        self._acts = disks.leads() and bool(self._keep or self._every)
        self._before = checkpoint_files.newest(self._root) if self._acts and self._root else None

    @watchdog.phase(watchdog.SAVING)
    def after(self, path: Path, iteration: int) -> None:
        """Remove checkpoints that need not be kept, after the checkpoint of an iteration is complete."""
        if not self._acts or self._root is None:
            return
        before, self._before = self._before, path
        found = whole_checkpoints.surplus(self._root, self._keep or 1, self._every, _is_whole, iteration)
        for old in found:
            if old.is_symlink() or not (self._keep or old == before):
                continue
            try:
                removal.remove(old)
            except UsageError as error:
                self._say(f" {error}")
            else:
                self._say(f" removed {old}")


def _is_whole(folder: Path) -> bool:
    """Return True if all files of a checkpoint exist and have the expected sizes.

    Their contents were verified when they were saved.
    """
    return not (whole_checkpoints.incomplete(folder) or checksums.of_other_sizes(folder))
