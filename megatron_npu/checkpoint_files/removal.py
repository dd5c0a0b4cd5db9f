"""Remove checkpoints safely.

An interrupted removal never leaves a checkpoint that appears to be complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError


def remove(path: Path) -> None:
    """Remove a checkpoint, or a link to one.

    Raises:
        UsageError: the checkpoint cannot be removed.
    """
    doomed = files.partial_folder(path)
    try:
        if path.is_symlink():
            path.unlink()
            return
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise UsageError(
            f"{error.filename or path} cannot be removed ({error.strerror}); its folder must be writable",
            remedy="Change the permissions, or remove it manually.",
        ) from error
