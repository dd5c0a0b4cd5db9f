"""Remove lock files that interrupted compilations have left in torch's cache of C++ extensions.

``torch.utils.cpp_extension.load`` compiles under a lock, the file ``lock`` in the extension's folder, which
it keeps open. A killed process leaves the file, and every later process waits forever without a message
(``torch.utils.file_baton``). DeepSpeed compiles at its start, and megatron-core 0.19 in the first step that
recomputes an output (``tensor_parallel.random``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LOCK = "lock"
_PROCESSES = Path("/proc")


def folder() -> Path:
    """Return the folder in which torch compiles this user's C++ extensions.

    This function corresponds to ``cpp_extension._get_build_directory``.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    # without a home directory, torch too takes the name "~" in the working directory
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(chosen) if chosen else Path(cache) / "torch_extensions"


def stale(place: Path | None = None) -> list[Path]:
    """Return the lock files that no process on this machine holds open.

    The result is empty if this cannot be determined.

    Args:
        place: the cache folder. If None, that of this user.
    """
    root = folder() if place is None else place
    locks = sorted({*root.glob(f"*/{_LOCK}"), *root.glob(f"*/*/{_LOCK}")})
    if not locks or not (_PROCESSES / "self" / "fd").is_dir():
        return []
    held = _open_files()
    return [lock for lock in locks if _identity(lock) not in held]


def remove_stale(speaker: str) -> list[Path]:
    """Remove stale lock files from this user's extension cache, log this on stderr, and return the files.

    Among the processes that a launcher starts on a machine, only the first does this.

    Do not share the cache between machines: DeepSpeed compiles for the processor of one machine. Set
    TORCH_EXTENSIONS_DIR to a separate folder for each machine.

    Args:
        speaker: the command named in the log line.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    found = stale()
    for lock in found:
        lock.unlink(missing_ok=True)
        print(f"{speaker}: removed the stale lock {lock}", file=sys.stderr)
    return found


def _open_files() -> set[tuple[int, int]]:
    """Return the device and inode numbers of all open files of processes that this user can inspect."""
    found = set()
    for link in _PROCESSES.glob("[0-9]*/fd/*"):
        identity = _identity(link)
        if identity is not None:
            found.add(identity)
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # it has ended, or belongs to another user
        return None
    return status.st_dev, status.st_ino
