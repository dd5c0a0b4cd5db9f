"""Work with a cached result: the first of several processes computes it, the others read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def first_alone(file: Path) -> Iterator[None]:
    """Run the block first in one process; the others follow together when it has finished.

    There is no barrier, which would end a run whose first rank works for longer than collectives may take.
    The lock is the kernel's and ends with its process, however that ends. Where the file system has none,
    everybody does the work.

    Args:
        file: that the processes have in common; it is made, and stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return
