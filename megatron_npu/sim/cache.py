"""Manage the simulator's cache: its location, its preparation by one process, and safe loading."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_npu.base import files, settings
from megatron_npu.base.errors import UsageError
from megatron_npu.process import user_cache

_REMEDY = f"Set another folder with {settings.SIM_CACHE.name}."
_LIBRARIES = ".libraries"  # the file that lists those of a folder


def root() -> Path:
    """Return the simulator's cache directory, which need not exist.

    The result is the directory in the setting, or otherwise in the user's cache.
    """
    chosen = settings.SIM_CACHE.get()
    return Path(chosen).expanduser().absolute() if chosen else user_cache.root() / "sim"


def say(text: str) -> None:
    """Print progress to stderr.

    Preparation takes seconds to minutes, and stdout belongs to the command.
    """
    print(f"megatron-npu sim: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _opened() -> Iterator[int]:
    try:
        with user_cache.opened(root(), _REMEDY) as folder:
            user_cache.require_own_path(root().resolve(), _REMEDY)  # a wheel is imported by its path
            user_cache.require_executable(root(), folder, _REMEDY)
            user_cache.require_descriptors()
            yield folder
    except UsageError as error:
        raise UsageError(f"the simulator's cache: {error.given}", error.expected, error.remedy) from error


def prepared(name: str, prepare: Callable[[Path], None]) -> Path:
    """Return the cached directory ``name``, after preparing it if necessary.

    If it does not exist, ``prepare(directory)`` fills it.

    The directory is filled under a temporary name and renamed, so a directory with its final name is
    complete. A file lock ensures that the first of several processes (torchrun's ranks, xdist's workers)
    prepares it while the others wait.

    Raises:
        UsageError: the cache is not writable, or another user may have written to it.
    """
    final = root() / name
    with _opened() as cache:
        if _is_there(cache, name):
            return final
        waits = f"waiting for another process to prepare {name}"
        with user_cache.locked(root() / f"{name}.lock", _REMEDY, lambda: say(waits)):
            if not _is_there(cache, name):
                _prepare(final, prepare)
                _remove_unused(cache, name)
    return final


def prepared_libraries(name: str, prepare: Callable[[Path], None]) -> Path:
    """Return a cached directory of libraries for ``load``, after preparing it if necessary.

    The directory is prepared again if a library is damaged.

    Raises:
        UsageError: see ``prepared``.
    """

    def prepare_and_seal(directory: Path) -> None:
        prepare(directory)
        _seal(directory)

    directory = prepared(name, prepare_and_seal)
    with _opened() as cache, _opened_part(cache, directory) as folder:
        user_cache.note_use(folder)
        if _are_whole(folder, directory):
            return directory
        say(f"{directory} is damaged and will be prepared again")
        with user_cache.locked(root() / f"{name}.lock", _REMEDY, lambda: None):
            with _opened_part(cache, directory) as now:  # unless another process has done so in the meantime
                whole = _are_whole(now, directory)
            if not whole:
                _prepare(directory, prepare_and_seal, replace=True)
    return directory


def load(path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load a library from a prepared directory through the same open file that was checked.

    Raises:
        UsageError: another user may have written the library.
        OSError: the loader rejects the library.
    """
    with _opened() as cache, _opened_part(cache, path.parent) as folder:
        descriptor = user_cache.opened_file(folder, path, _REMEDY)
        if descriptor is None:
            raise OSError(f"{path} does not exist")
        return user_cache.loaded(descriptor, mode)


@contextlib.contextmanager
def _opened_part(cache: int, directory: Path) -> Iterator[int]:
    with user_cache.opened(Path(directory.name), f"Remove {directory}.", within=cache) as folder:
        yield folder


def _is_there(cache: int, name: str) -> bool:
    """Return True if a directory exists, after checking that no other user can have filled it."""
    try:
        os.stat(name, dir_fd=cache)
    except FileNotFoundError:
        return False
    with _opened_part(cache, root() / name):
        return True


def _prepare(final: Path, prepare: Callable[[Path], None], replace: bool = False) -> None:
    # the lock is ours, so what has the temporary name was left by an interrupted attempt
    with files.new_folder(final, replace=replace) as partial:
        partial.chmod(user_cache.PRIVATE)
        prepare(partial)


def _seal(directory: Path) -> None:
    """Append digests to the libraries in a new directory, and write a list of the libraries."""
    names = sorted(path.name for path in directory.glob("*.so"))
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names:
            user_cache.seal(descriptor, name)
    finally:
        os.close(descriptor)
    (directory / _LIBRARIES).write_text("\n".join(names), encoding="utf-8")


def _are_whole(folder: int, directory: Path) -> bool:
    """Return True if all libraries in a directory exist and are undamaged."""
    listed = user_cache.opened_file(folder, directory / _LIBRARIES, f"Remove {directory}.")
    if listed is None:
        return False
    with open(listed, encoding="utf-8") as stream:
        names = stream.read().split()
    return all(_is_whole(folder, directory / name) for name in names)


def _is_whole(folder: int, path: Path) -> bool:
    descriptor = user_cache.opened_file(folder, path, f"Remove {path.parent}.")
    if descriptor is None:
        return False
    try:
        return user_cache.is_whole(descriptor)
    finally:
        os.close(descriptor)


def _remove_unused(cache: int, name: str) -> None:
    """Remove libraries of the same kind that nothing has used for a month."""
    kind = name.partition("-")[0]
    with os.scandir(cache) as entries:
        unused = [entry for entry in entries if user_cache.is_unused(entry)]
    for entry in unused:
        if entry.name.startswith(f"{kind}-") and kind != "site":  # a wheel would be downloaded again
            path = root() / entry.name
            shutil.rmtree(path) if entry.is_dir(follow_symlinks=False) else path.unlink(missing_ok=True)
