"""The folder of a checkpoint while all ranks write it: hidden, until it is whole and has its name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_npu import files
from megatron_npu.training import checkpoint_files


@contextlib.contextmanager
def writing(root: str | Path, iteration: int) -> Iterator[Path]:
    """Give the folder that all ranks write an iteration's checkpoint into. All ranks must call this.

    If the block ends well on every rank, the folder has its name behind it and the tracker names it; else it
    is removed, and the disk that was full has room again.

    Args:
        root: of all checkpoints of the run.
        iteration: of this one.
    """
    place = checkpoint_files.directory(root, iteration)
    part = files.partial_folder(place)
    first = dist.get_rank() == 0
    try:
        if first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        yield part
    except BaseException:
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if first:
        files.replace_folder(place, part)  # there is one if a run went back to an earlier iteration
        checkpoint_files.set_latest(root, iteration)
    dist.barrier()
