"""Check that all ranks of a run see the same folder, and raise a one-line error if they do not.

Machines with separate disks under the same path would each write a part of a checkpoint, which would remain
unnoticed until the checkpoint is loaded. On a network file system, a rank that does not see a file retries
for a while, because such file systems cache missing entries for some seconds.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from megatron_npu.base.errors import UsageError

_MARK = ".seen-by-all-ranks."
_OF_ONE_MACHINE = frozenset("ext2 ext3 ext4 xfs btrfs zfs tmpfs ramfs overlay f2fs".split())
_PATIENCE = {True: 1.0, False: 60.0}  # seconds, where it is of one machine, and on a network
_PAUSE = 0.05
_SHARE = "a folder that all machines share"
PER_MACHINE = (
    ", or add --save-per-machine to save a part on each machine, and join them with "
    "`megatron-npu checkpoint gather`"
)
_SHOWN = 8  # machines in one line


def require(flag: str, folder: Path, otherwise: str = "") -> None:
    """Check that every rank sees a file that rank 0 creates in a folder. All ranks must call this.

    If rank 0 cannot write to the folder, nothing is checked; the first real write reports the problem.

    Args:
        flag: the flag that names the folder.
        folder: the folder as given.
        otherwise: an alternative for the user, as the end of a sentence.

    Raises:
        UsageError: some ranks do not see the file; raised on all ranks, naming their machines.
    """
    seen = views(folder)
    if not all(each for each, _ in seen):
        raise UsageError(
            f"{flag} {folder} must be {_SHARE}, but files that {seen[0][1]} (rank 0) writes there are not "
            f"visible on {_machines(seen, lambda own: not own)}",
            remedy=f"Mount it on every machine under this path, or use a shared folder{otherwise}.",
        )


def views(folder: Path) -> list[tuple[bool, str]]:
    """Return, for each rank, whether it sees a file that rank 0 creates in a folder, and the name of its
    host.

    All ranks must call this. The list is empty if there is one rank, or if rank 0 cannot create the file.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    mark = _made(folder) if dist.get_rank() == 0 else None
    name = _gathered(mark and mark.name)[0][0]
    if name is None:
        return []
    seen = _gathered(becomes_true(folder, (folder / name).is_file))
    if mark is not None:
        mark.unlink(missing_ok=True)
    _gathered(None)  # nobody looks into the folder before the file is gone
    return seen


def require_same(flag: str, folder: str | Path, found: str | None) -> None:
    """Check that all ranks have found the same checkpoint in a folder. All ranks must call this.

    Args:
        flag: the flag that names the folder.
        folder: the folder as given.
        found: the name of the checkpoint that this rank found, or None if it found none.

    Raises:
        UsageError: ranks found different checkpoints; raised on all ranks, naming the machines.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    every = _gathered(found)
    if len({own for own, _ in every}) > 1:
        kinds = dict.fromkeys(own for own, _ in every)
        told = (
            f"{kind or 'no checkpoint'} on {_machines(every, functools.partial(operator.eq, kind))}"
            for kind in kinds
        )
        raise UsageError(
            f"{flag} {folder} must be {_SHARE}, or hold the same checkpoint on each machine, but the ranks "
            f"find different contents there: {'; '.join(told)}",
            remedy="Mount it on every machine under this path, or copy the whole checkpoint to each of them.",
        )


def require_all(folder: Path, names: Iterable[str]) -> None:
    """Check that every rank sees the files that the ranks have written to a folder.

    All ranks must call this.

    Args:
        folder: the folder of a checkpoint written by all ranks.
        names: the files that this rank knows of.

    Raises:
        FileNotFoundError: some ranks do not see a file; raised on all ranks, naming the file and the
            machines.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    together = sorted(set().union(*(own for own, _ in _gathered([*names]))))
    missing = _gathered([name for name in together if not becomes_true(folder, (folder / name).is_file)][:1])
    if any(own for own, _ in missing):
        lost = next(own[0] for own, _ in missing if own)
        raise FileNotFoundError(
            f"{folder / lost}, written by another rank, is not visible on {_machines(missing, bool)}; "
            f"--save must be {_SHARE}"
        )


def becomes_true(folder: Path, holds: Callable[[], bool]) -> bool:
    """Return True if a condition on a folder becomes true, allowing time for delays of network file
    systems.
    """
    if holds():
        return True
    end = time.monotonic() + _PATIENCE[_is_of_one_machine(folder)]
    while time.monotonic() < end:
        time.sleep(_PAUSE)
        if holds():
            return True
    return False


def _made(folder: Path) -> Path | None:
    """Create a new file in a folder, creating the folder if necessary.

    Return None if this fails.
    """
    mark = folder / f"{_MARK}{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_MARK}*"):  # by a run that was killed just then
            left.unlink(missing_ok=True)
        mark.touch()
        return mark
    return None


def _is_of_one_machine(folder: Path) -> bool:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    mounts = [each for each in psutil.disk_partitions(all=True) if there.is_relative_to(each.mountpoint)]
    nearest = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return nearest is not None and nearest.fstype in _OF_ONE_MACHINE


def _gathered(own: Any) -> list[tuple[Any, str]]:
    """Return the values of all ranks, each with the name of the rank's host."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (own, socket.gethostname()))
    return parts


def _machines(every: Sequence[tuple[Any, str]], of: Callable[[Any], bool]) -> str:
    """Return the names of the machines that have a rank whose value satisfies the condition ``of``."""
    found: dict[str, int] = {}
    for rank, (own, host) in enumerate(every):
        if of(own):
            found.setdefault(host, rank)
    named = [f"{host} (rank {rank})" for host, rank in found.items()]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more
