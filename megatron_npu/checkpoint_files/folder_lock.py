"""Lock a folder for one run at a time with a kernel lock, which is released when the process ends.

A ``filelock`` would be inherited by forked children (data loaders, checkpoint writers) and held until the
last of them ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

NAME = ".lock"

_held: set[int] = set()  # descriptors


def hold(folder: Path) -> int | None:
    """Lock a folder, creating it if necessary.

    Return the lock for ``release``.

    The result is None if the file system has no locks; no run is rejected in this case.

    Raises:
        UsageError: another run holds the lock.
        OSError: the folder cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _opened(folder / NAME)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(
            f"another run is writing to --save {folder} (it holds the lock {folder / NAME}); each run "
            "requires its own folder",
            remedy="Wait for that run or stop it, or use another folder.",
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    _held.add(descriptor)
    return descriptor


def _opened(path: Path) -> int:
    """Open the lock file, creating it if necessary.

    A file or link of another user is opened read-only.
    """
    try:
        return files.own_opener(str(path), os.O_RDWR | os.O_CREAT)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def held() -> bool:
    """Return True if this process has locked a folder."""
    return bool(_held)


def release(descriptor: int) -> None:
    """Release the lock of a folder."""
    _held.discard(descriptor)
    os.close(descriptor)


def _release_all() -> None:
    for descriptor in list(_held):
        release(descriptor)


os.register_at_fork(after_in_child=_release_all)
