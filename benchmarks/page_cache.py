"""Drop files from the kernel's page cache, so that a read comes from the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Make the kernel drop the cached pages of the files in ``folder``."""
    for path in folder.iterdir():
        with contextlib.closing(os.fdopen(os.open(path, os.O_RDONLY))) as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
