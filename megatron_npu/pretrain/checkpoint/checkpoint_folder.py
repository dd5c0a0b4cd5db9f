"""Manage the folder of a checkpoint, which is hidden while it is being written and renamed when it is
complete.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_npu.base import files
from megatron_npu.checkpoint_files import disks, object_storage
from megatron_npu.pretrain.checkpoint import checkpoint_files

_TRIES, _PAUSE = 20, 0.1  # and seconds between them


@contextlib.contextmanager
def writing(root: str | Path, iteration: int) -> Iterator[Path]:
    """Create the folder into which all ranks write the checkpoint of an iteration.

    All ranks must call this.

    If the block succeeds on every rank, the folder is given its final name and the tracker is updated;
    otherwise the folder is removed, which frees the disk space.

    Args:
        root: the folder of all checkpoints of the run.
        iteration: the iteration of the checkpoint.
    """
    part = hidden(root, iteration)
    try:
        begin(root, iteration)
        yield part
    except BaseException:
        discard(root, iteration)
        raise
    finish(root, iteration)


def begin(root: str | Path, iteration: int) -> Path:
    """Create the hidden folder for the checkpoint of an iteration, and return it.

    All ranks must call this.
    """
    part = hidden(root, iteration)
    if disks.leads():
        if part.is_symlink():
            part.unlink()
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    return part


def finish(root: str | Path, iteration: int) -> None:
    """Rename the checkpoint's folder and update the tracker file after all ranks have written.

    All ranks must call this.

    With ``--object-storage``, the checkpoint is then copied there.

    Raises:
        UploadError: it could not be copied.
    """
    if disks.leads():
        # there is one if a run went back to an earlier iteration
        files.replace_folder(checkpoint_files.directory(root, iteration), hidden(root, iteration))
        checkpoint_files.set_latest(root, iteration)
    dist.barrier()
    object_storage.upload(checkpoint_files.directory(root, iteration))


def discard(root: str | Path, iteration: int) -> None:
    """Remove the hidden folder of an unfinished checkpoint.

    A single rank may call this.
    """
    if disks.leads():
        _remove(hidden(root, iteration))


def hidden(root: str | Path, iteration: int) -> Path:
    """Return the hidden folder for the checkpoint of an iteration."""
    return files.partial_folder(checkpoint_files.directory(root, iteration))


def _remove(folder: Path) -> None:
    """Remove a folder into which other processes may still be writing files.

    megatron-core (0.12 to 0.16) forks its writers, and a Ctrl-C that ends a rank does not end them at once.
    """
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_PAUSE)
