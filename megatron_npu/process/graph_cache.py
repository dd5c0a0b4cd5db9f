"""Select a private folder for the graphs that torch.compile caches.

The graphs contain C++ code and pickles, which torch loads without checking their owner.

torch's default folder, ``/tmp/torchinductor_USER``, can be created first by any user. Importing
``torch._dynamo`` (an optimizer does) creates it and sets the variable, so ours is set before that.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.process import extension_locks, user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_REMEDY = f"Set {VARIABLE} to a folder of your own (chmod 700)."
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
_EXTENSIONS, _TRITON = "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"


def claim() -> Path:
    """Make torch store its compiled graphs in a private folder (mode 0700), and return the folder.

    A folder that the user named is used if the user owns it. torch's own folder in /tmp, which its import
    writes into the variable, is ignored. Without a home that is writable and not mounted noexec, the
    folder is in the temporary directory and also private.

    Raises:
        UsageError: another user owns the folder or can write to it or replace it, or the named folder cannot
            be created.
    """
    named = os.environ.get(VARIABLE, "")
    if named and not _is_torchs(named):
        folder = _open(Path(named), f"Set {VARIABLE} to another folder, or unset it.")
    else:
        folder = _default()
    os.environ[VARIABLE] = str(folder)
    os.environ.setdefault(_HEADERS, "0")  # torch 2.13 keeps them in its own place in /tmp, whatever is named
    return folder


def _is_torchs(named: str) -> bool:
    folder = Path(named).absolute()
    places = {Path(place).absolute() for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")}
    return folder.parent in places and folder.name.startswith("torchinductor_")


def _default() -> Path:
    try:
        folder = _open(user_cache.root() / "inductor", _REMEDY)
        require_executable(folder)
        return folder
    except UsageError as error:
        if not _cannot_be_made(error):
            raise
    return _open(Path(tempfile.gettempdir(), f"megatron_npu_inductor_{os.geteuid()}"), _REMEDY)


def _cannot_be_made(error: UsageError) -> bool:
    """Return True if the error means that the home directory does not exist, is read-only or is noexec.

    A wrong owner is another error.
    """
    is_named = error.given.startswith("no home folder") or "mounted noexec" in error.given
    return is_named or isinstance(error.__cause__, OSError)


def require_executable(folder: Path) -> None:
    """Check that torch can load compiled graphs from a folder.

    Raises:
        UsageError: it is on a file system that is mounted noexec.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        user_cache.require_executable(folder, descriptor, f"Set {VARIABLE} to a folder on another disk.")
    finally:
        os.close(descriptor)


def _open(folder: Path, remedy: str) -> Path:
    """Create the folder if it does not exist, check that no other user can change it, and return its
    resolved path.
    """
    folder = Path(os.path.realpath(folder))
    with user_cache.opened(folder, remedy) as descriptor:
        if not os.access(".", os.W_OK, dir_fd=descriptor):
            error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise user_cache.unusable(folder, error, remedy) from error
    user_cache.require_own_path(folder, remedy)  # torch is given a path, not this descriptor
    return folder


def require_own_caches() -> None:
    """Check that no other user is able to write to existing caches of Triton and of torch's C++ extensions.

    Neither checks who owns its cache. A variable can name another user's folder, and so can HOME.

    Raises:
        UsageError: another user owns a cache, or can write to it or replace it.
    """
    for variable, cache in _caches().items():
        remedy = f"Set {variable} to a folder of your own (chmod 700)."
        folder = Path(os.path.realpath(cache))
        if not folder.is_dir():
            continue
        if files.is_writable_by_others(folder.stat()):  # sticky or not: anyone may add a file
            raise UsageError(
                f"code is loaded from {cache}, to which other users can write; only this user may have write "
                "access there",
                remedy=remedy,
            )
        user_cache.require_own_path(folder / "code", remedy)


def _caches() -> dict[str, Path]:
    """Return the cache folders, keyed by the variables that select them.

    Without a home directory, both libraries take the name "~" in the working directory.
    """
    triton = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    return {
        _TRITON: Path(os.environ.get(_TRITON) or triton),
        _EXTENSIONS: extension_locks.folder(),
    }
