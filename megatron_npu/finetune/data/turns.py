"""Compute a cached result once: the first of several processes computes it, and the others read it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def first_alone(file: Path) -> Iterator[None]:
    """Run the block in one process first, and in the other processes together afterwards.

    A barrier would end a run whose first rank takes longer than the collective timeout, so this function uses
    a kernel lock, which is released when its process ends. On a file system without locks, every process does
    the work.

    Args:
        file: the lock file, which all processes share; it is created and kept.
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
