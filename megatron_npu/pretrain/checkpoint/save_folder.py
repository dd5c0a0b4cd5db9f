"""Lock the ``--save`` folder for one run, and remove incomplete files that killed runs left there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import disks, folder_lock, shared_folder
from megatron_npu.pretrain.checkpoint import checkpoint_files


@contextlib.contextmanager
def owned(save: str | None, rank: int) -> Iterator[None]:
    """Lock the ``--save`` folder for this run inside the ``with`` block.

    Rank 0 also removes the leftovers of killed runs.

    On a file system without locks, no folder is rejected and nothing is removed.

    Args:
        save: the folder; if it is None or empty, nothing is saved.
        rank: the number of this process.

    Raises:
        UsageError: another run has locked the folder, or the folder cannot be created.
    """
    if not save or rank != 0:
        yield
        return
    folder = Path(save)
    try:
        lock = folder_lock.hold(folder)
    except OSError as error:
        raise UsageError(
            f"the directory --save {folder} cannot be created: {error.strerror}", remedy="Use another path."
        ) from None
    if lock is None:
        yield
        return
    try:
        remove_unfinished(folder)
        yield
    finally:
        folder_lock.release(lock)


def require_shared(save: str | None, *, per_machine: bool, storage: str | None = None) -> None:
    """Check that all ranks save to the same folder. All ranks must call this after they have connected.

    Args:
        save: the folder; if it is None or empty, nothing is saved.
        per_machine: whether each machine may have its own folder (--save-per-machine), which is then locked
            on that machine.
        storage: where checkpoints are copied to (--object-storage), if anywhere.

    Raises:
        UsageError: machines have separate folders without that flag, or another run has locked one of them.
    """
    disks.forget()
    disks.copy_to(storage)
    if save and per_machine:
        hold_on_each_machine(Path(save))
    elif save:
        shared_folder.require("--save", Path(save), shared_folder.PER_MACHINE)


def hold_on_each_machine(folder: Path) -> None:
    """From now on, save to a separate folder on each machine.

    The first rank of each machine locks the folder.

    Rank 0 has already locked its folder. The lock ends with the process. All ranks must call this.

    Raises:
        UsageError: another run has locked one of these folders.
    """
    disks.save_into(folder)
    if disks.leads() and dist.is_initialized() and dist.get_rank():
        folder_lock.hold(folder)
        remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove the incomplete checkpoints of a killed run, and restore the checkpoint that it was replacing."""
    files.restore_replaced(folder)
    for unfinished in checkpoint_files.unfinished(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f" removed {unfinished}, an incomplete checkpoint left by a killed run", flush=True)
