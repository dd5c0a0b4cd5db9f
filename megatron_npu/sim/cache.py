"""Where prepared things are kept, and how several processes prepare one thing exactly once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_npu import files, settings
from megatron_npu.errors import UsageError


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


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Let one process at a time into the block; one that has to wait says so.

    Raises:
        UsageError: the cache cannot be written to.
    """
    from filelock import FileLock, Timeout  # torch requires it; not above: every start imports this module

    lock = FileLock(root() / f"{name}.lock")
    try:
        root().mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        say(f"waiting for another process that prepares {name}")
        lock.acquire()
    except OSError as error:
        raise UsageError(
            f"the simulator's cache {root()} ({error.strerror})",
            "a directory that can be made and written to",
            f"Name another one with {settings.SIM_CACHE.name}.",
        ) from error
    try:
        yield
    finally:
        lock.release()


def prepared(name: str, prepare: Callable[[Path], None]) -> Path:
    """Return the cached directory ``name``, made by ``prepare(directory)`` if it is not there yet.

    It is filled under a temporary name and renamed, so what has its final name is complete. A file lock
    lets the first of several processes (torchrun's ranks, xdist's workers) prepare and the others wait.

    Raises:
        UsageError: the cache cannot be written to.
    """
    final = root() / name
    if final.is_dir():
        return final
    with _lock(name):
        if not final.is_dir():
            # the lock is ours, so what has the temporary name was left by an interrupted attempt
            with files.new_folder(final) as partial:
                prepare(partial)
    return final
