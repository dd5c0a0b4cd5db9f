"""Find the complete, undamaged checkpoints from which a run can resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums
from megatron_npu.pretrain.checkpoint import checkpoint_files


def newest_whole(root: str | Path) -> int | None:
    """Return the iteration of the newest undamaged checkpoint under ``root``, or None."""
    for iteration in reversed(checkpoint_files.iterations(root)):
        folder = checkpoint_files.directory(root, iteration)
        if not incomplete(folder) and not checksums.damaged(folder):
            return iteration
    return None


def surplus(
    root: str | Path,
    keep: int,
    every: int | None,
    is_whole: Callable[[Path], bool],
    newest: int | None = None,
) -> list[Path]:
    """Return the checkpoints to remove, all of which are older than the newest undamaged ones.

    Damaged checkpoints do not count and are kept.

    Args:
        root: the folder of all checkpoints.
        keep: the number of valid checkpoints to keep.
        every: if given, also keep checkpoints whose iteration is a multiple of this number.
        is_whole: returns whether a checkpoint is valid; called from the newest checkpoint on, until enough
            valid ones are found.
        newest: the iteration to start with; later checkpoints are kept. If None, start with the last one.
    """
    older = [each for each in checkpoint_files.iterations(root) if newest is None or each <= newest]
    latest = checkpoint_files.newest(root)
    while older and keep:
        keep -= is_whole(checkpoint_files.directory(root, older.pop()))
    paths = [checkpoint_files.directory(root, each) for each in older if not every or each % every]
    return [path for path in paths if path != latest]


def incomplete(folder: Path) -> list[str]:
    """Return the reasons why a checkpoint is incomplete, or an empty list if it is complete."""
    from megatron_npu.pretrain.checkpoint import torch_format  # which needs torch

    if not torch_format.holds_ranks(folder):
        return [f"{name} is missing" for name in checkpoint_files.missing(folder)]
    try:
        torch_format.Checkpoint(folder)  # the tables of its files; weights stay on disk
    except UsageError as error:
        return [error.given]
    return []
