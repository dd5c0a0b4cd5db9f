"""Where prepared things are kept, and how several processes prepare one thing exactly once."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_npu import settings


def root() -> Path:
    """Return the simulator's cache directory: the setting, else the user's cache; it need not exist."""
    chosen = settings.SIM_CACHE.get()
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_npu" / "sim"


def say(text: str) -> None:
    """Show progress: preparation takes seconds to minutes, and standard output belongs to the command."""
    print(f"megatron-npu sim: {text}", file=sys.stderr, flush=True)


def prepared(name: str, prepare: Callable[[Path], None]) -> Path:
    """Return the cached directory ``name``, made by ``prepare(directory)`` if it is not there yet.

    It is filled under a temporary name and renamed, so what has its final name is complete. A file lock
    lets the first of several processes (torchrun's ranks, xdist's workers) prepare and the others wait.
    """
    final = root() / name
    if final.is_dir():
        return final
    root().mkdir(parents=True, exist_ok=True)
    with (root() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        # The lock is ours: a directory under the temporary name is the rest of an interrupted attempt.
        partial = root() / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            prepare(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(final)
    return final
