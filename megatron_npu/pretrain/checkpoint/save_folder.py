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
    """Hold ``--save`` for this run in the block: rank 0 locks it, and removes what killed runs have left.

    A file system without locks gives none, and then nothing is refused and nothing removed.

    Raises:
        UsageError: another run holds it, or it cannot be made.
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
    """Check that all ranks save into one folder. All ranks must call this, when they have met.

    With --save-per-machine machines may have one each, which is then held for this run on each.

    Raises:
        UsageError: their machines have one each, and no flag allows it; or another run holds one of them.
    """
    disks.forget()
    if args.save and args.save_per_machine:
        hold_on_each_machine(Path(args.save))
    elif args.save:
        shared_folder.require("--save", Path(args.save), shared_folder.PER_MACHINE)


def hold_on_each_machine(folder: Path) -> None:
    """Save into a folder of each machine's own from now on, which the first rank there holds.

    Rank 0 holds its own already. The lock ends with the process. All ranks must call this.

    Raises:
        UsageError: another run holds one of them.
    """
    disks.save_into(folder)
    if disks.leads() and dist.is_initialized() and dist.get_rank():
        folder_lock.hold(folder)
        remove_unfinished(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that a killed run was writing, and give back what it was about to replace."""
    files.restore_replaced(folder)
    for unfinished in checkpoint_files.unfinished(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f" removed {unfinished}, an incomplete checkpoint of a killed run", flush=True)
