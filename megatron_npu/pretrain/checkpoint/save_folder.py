"""The ``--save`` folder: lock it for one run, and remove incomplete files of killed runs."""

from __future__ import annotations

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import disks, folder_lock, shared_folder
from megatron_npu.pretrain.checkpoint import checkpoint_files


@contextlib.contextmanager
def owned(args: Namespace) -> Iterator[None]:
    """Lock ``--save`` for this run inside the block: rank 0 locks it and removes leftovers of killed runs.

    On a file system without locks nothing is rejected and nothing is removed.

    Raises:
        UsageError: another run has locked the folder, or it cannot be created.
    """
    if not args.save or args.rank != 0:
        yield
        return
    folder = Path(args.save)
    try:
        lock = folder_lock.hold(folder)
    except OSError as error:
        raise UsageError(
            f"--save {folder}: {error.strerror}", "a directory that can be created", "Use another path."
        ) from None
    if lock is None:
        yield
        return
    try:
        remove_unfinished(folder)
        yield
    finally:
        folder_lock.release(lock)


def require_shared(args: Namespace) -> None:
    """Check that all ranks save to one folder. All ranks must call this after they have connected.

    With --save-per-machine each machine may have its own folder, which is then locked on each.

    Raises:
        UsageError: machines have separate folders without that flag, or another run has locked one of them.
    """
    disks.forget()
    if args.save and args.save_per_machine:
        hold_on_each_machine(Path(args.save))
    elif args.save:
        shared_folder.require("--save", Path(args.save), shared_folder.PER_MACHINE)


def hold_on_each_machine(folder: Path) -> None:
    """Save to a separate folder on each machine from now on, locked by the first rank there.

    Rank 0 has already locked its own. The lock ends with the process. All ranks must call this.

    Raises:
        UsageError: another run has locked one of these folders.
    """
    disks.save_into(folder)
    if disks.leads() and dist.is_initialized() and dist.get_rank():
        folder_lock.hold(folder)
        remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that a killed run was writing, and restore one that it was about to replace."""
    files.restore_replaced(folder)
    for unfinished in checkpoint_files.unfinished(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f" removed {unfinished}, an incomplete checkpoint of a killed run", flush=True)
