"""Let the first of several processes compute a cached result while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_npu.base import files


@contextlib.contextmanager
def first_alone(file: Path) -> Iterator[None]:
    """Run the ``with`` block in one process first, and then in all other processes at the same time.

    This function uses a kernel lock, which is released when its process ends. A barrier would abort a run
    whose first rank takes longer than the timeout for collectives. On a file system without locks, every
    process does the work.

    Args:
        file: the lock file, which all processes share. The file is created if needed and is not deleted.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = files.own_opener(str(file), os.O_RDWR | os.O_CREAT)
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
