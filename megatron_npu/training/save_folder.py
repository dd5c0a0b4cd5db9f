"""The folder that a run saves into: one run at a time, and nothing in it of runs that were killed."""

from __future__ import annotations

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_npu import files
from megatron_npu.errors import UsageError
from megatron_npu.training import checkpoint_files

LOCK = ".lock"


@contextlib.contextmanager
def owned(args: Namespace) -> Iterator[None]:
    """Hold ``--save`` for this run in the block: rank 0 locks it, and removes what killed runs have left.

    The lock is the kernel's: it ends with the process, however that ends. A file system without locks gives
    none, and then nothing is refused and nothing removed.

    Raises:
        UsageError: another run holds it.
    """
    if not args.save or args.rank != 0:
        yield
        return
    from filelock import FileLock, Timeout  # torch requires it

    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, mode=0o640)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"--save {folder}: another run is writing there (it holds {folder / LOCK})",
            "a folder of its own for each run",
            "Wait for that run or end it, or name another folder.",
        ) from None
    except (NotImplementedError, OSError):
        yield
        return
    try:
        remove_unfinished(folder)
        yield
    finally:
        lock.release()


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that a killed run was writing, and give back what it was about to replace."""
    files.restore_replaced(folder)
    for unfinished in checkpoint_files.unfinished(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        print(f" removed {unfinished}, which a run that was killed left unfinished", flush=True)
