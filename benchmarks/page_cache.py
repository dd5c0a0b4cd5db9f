"""What the kernel keeps of files in memory: let it forget them, so that a read comes from the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Let the kernel forget what it has of the files in ``folder``."""
    for path in folder.iterdir():
        with contextlib.closing(os.fdopen(os.open(path, os.O_RDONLY))) as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
