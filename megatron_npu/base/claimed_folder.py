"""Lock a temporary folder while a process writes to it, so that a second process does not remove it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(partial: Path, path: Path) -> Iterator[None]:
    """Hold the lock of an existing temporary folder inside the ``with`` block.

    On a file system without locks, the folder is only opened.

    Args:
        partial: the temporary folder.
        path: its final name, for the error message.

    Raises:
        OSError: another process has locked the folder.
    """
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process is writing to this folder", str(path)) from None
        except OSError:  # no locks
            pass
        yield
    finally:
        os.close(descriptor)
