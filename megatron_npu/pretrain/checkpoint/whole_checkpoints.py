"""Which checkpoints a run can go on from: whether they have all their files, and these are not damaged."""

from __future__ import annotations

from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums
from megatron_npu.pretrain.checkpoint import checkpoint_files


def newest_whole(root: str | Path) -> int | None:
    """Return the iteration of the newest checkpoint under ``root`` that is not damaged; None without any."""
    for iteration in reversed(checkpoint_files.iterations(root)):
        folder = checkpoint_files.directory(root, iteration)
        if not incomplete(folder) and not checksums.damaged(folder):
            return iteration
    return None


def incomplete(folder: Path) -> list[str]:
    """Return what a checkpoint lacks to be loaded, in the format that it has."""
    from megatron_npu.pretrain.checkpoint import torch_format  # which needs torch

    if not torch_format.holds_ranks(folder):
        return [f"{name} is missing" for name in checkpoint_files.missing(folder)]
    try:
        torch_format.Checkpoint(folder)  # the tables of its files; weights stay on disk
    except UsageError as error:
        return [error.given]
    return []
