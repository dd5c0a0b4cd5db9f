"""Manage private cache folders for code that is loaded, to which no other user can write.

A folder is opened and checked, files are opened relative to it, and the loader receives the open file, so
that replacing a name in between has no effect. A library ends with a digest of its content, so that a
truncated library is compiled again instead of loaded: reading past the end of a mapped file kills the
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_npu.base import errors, files
from megatron_npu.base.errors import UsageError

if TYPE_CHECKING:
    from filelock import BaseFileLock

PRIVATE = 0o700
_BY_OTHERS = 0o022  # writable
_ROOT = 0  # may do anything without a cache, too
_DESCRIPTORS = "/proc/self/fd"
_ALL_USERS = ["0", "0", "4294967295"]  # of /proc/self/uid_map: each of them is itself
_SEAL = b"\nmegatron_npu sha256 "
_SEALED = len(_SEAL) + hashlib.sha256().digest_size
_DAY = 86400.0
_UNUSED = 30 * _DAY
_LOADED = itertools.count(1)  # libraries of this process
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system that has none says


def root() -> Path:
    """Return this project's folder in the user's cache, which need not exist.

    The folder is the one that ``platformdirs`` returns on Linux, without that dependency.

    Raises:
        UsageError: the user's cache folder cannot be determined.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    except RuntimeError as error:
        expected = "HOME or XDG_CACHE_HOME"
        raise UsageError(
            f"no home folder was found ({error}); {expected} must be set", remedy="Export one of them."
        ) from None
    return cache / "megatron_npu"


@contextlib.contextmanager
def opened(path: Path, remedy: str, within: int | None = None) -> Iterator[int]:
    """Open a folder to which only this user can write.

    A missing folder is created with mode 0700.

    Args:
        path: the folder.
        remedy: how to select another folder.
        within: a descriptor of the folder to which ``path`` is relative.

    Raises:
        UsageError: another user owns the folder or can write to it, or it cannot be created or read.
    """
    try:
        if within is None:
            path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=within)
    except OSError as error:
        raise unusable(path, error, remedy) from error
    try:
        _require_own(path, descriptor, remedy)
        yield descriptor
    finally:
        os.close(descriptor)


def require_own_path(folder: Path, remedy: str) -> None:
    """Check that no other user can replace a private folder with another folder.

    Use it for folders that other programs open by their path instead of by a descriptor.

    Args:
        folder: the resolved path of the folder.
        remedy: how to select another folder.

    Raises:
        UsageError: another user owns a parent folder, or can write to one that is not sticky.
    """
    for parent in folder.parents:
        status = parent.stat()
        others = files.is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX
        if others or status.st_uid not in (os.geteuid(), _ROOT, _unmapped()):
            raise UsageError(
                f"code is loaded from {folder}, but other users can replace this folder by writing to "
                f"{parent}; only this user may have write access there",
                remedy=remedy,
            )


def _unmapped() -> int:
    """Return the user id that represents unmapped users in a container, such as the root user of its machine.

    Where all users are mapped, as on a plain machine, this id is that of an ordinary user, ``nobody``.
    """
    try:
        if Path("/proc/self/uid_map").read_text(encoding="ascii").split() == _ALL_USERS:
            return _ROOT
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _ROOT


def unusable(path: Path, error: OSError, remedy: str) -> UsageError:
    """Return the error for a cache folder that cannot be created or written to."""
    return UsageError(
        f"the cache {path} cannot be used ({error.strerror or error}); it must be a directory that this "
        "user can create and write to",
        remedy=remedy,
    )


def _require_own(path: Path, descriptor: int, remedy: str) -> None:
    status = os.fstat(descriptor)
    if files.is_of_others(status):
        wrong = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & _BY_OTHERS:
        wrong = f"has mode {stat.S_IMODE(status.st_mode):o}: others may write to it"
    else:
        return
    raise UsageError(
        f"{path} {wrong}; code is loaded from it, so it must be writable only by this user",
        remedy=remedy,
    )


def opened_file(folder: int, path: Path, remedy: str) -> int | None:
    """Open a regular file and return its descriptor, which the caller closes.

    Return None if the file does not exist.

    Args:
        folder: a descriptor of the folder that contains the file.
        path: the path of the file; only its last component is used for opening.
        remedy: how to select another folder.

    Raises:
        UsageError: another user owns the file or can write to it, or it is not a regular file.
    """
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error, remedy) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path} must be a library, but it is not a regular file", remedy=remedy)
        _require_own(path, descriptor, remedy)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(folder: int, name: str) -> None:
    """Append a digest to a new library, make the file private, and flush it to disk."""
    with open(os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder), "r+b") as stream:
        digest = hashlib.sha256(stream.read()).digest()
        stream.write(_SEAL + digest)
        os.fchmod(stream.fileno(), PRIVATE)
        stream.flush()
        os.fsync(stream.fileno())


def is_whole(descriptor: int) -> bool:
    """Return True if a library file is complete, which means that it ends with the digest of its content."""
    content = memoryview(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    before, end = content[:-_SEALED], content[-_SEALED:]
    return bytes(end) == _SEAL + hashlib.sha256(before).digest()


def require_executable(path: Path, folder: int, remedy: str) -> None:
    """Check that libraries can be loaded from a folder.

    Args:
        path: the folder.
        folder: its descriptor.
        remedy: how to select another folder.

    Raises:
        UsageError: it is on a file system that is mounted noexec.
    """
    if os.fstatvfs(folder).f_flag & os.ST_NOEXEC:
        raise UsageError(
            f"{path} is on a file system that is mounted noexec, so no library can be loaded from it",
            remedy=remedy,
        )


def require_descriptors() -> None:
    """Check that this process can load libraries by their descriptors.

    Raises:
        UsageError: /proc is not mounted.
    """
    if not os.path.isdir(_DESCRIPTORS):
        raise UsageError(
            f"{_DESCRIPTORS} does not exist, but libraries are loaded by their descriptors in it",
            remedy=errors.MOUNT_PROC,
        )


def loaded(descriptor: int, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """Load a library from an open descriptor, which remains open.

    The loader treats libraries of the same name as identical, so each library gets a unique name: a forked
    process may close its parent's descriptors, whose numbers are then reused.

    Raises:
        OSError: the library cannot be loaded; the descriptor is closed.
        UsageError: /proc, by which it is loaded, is not mounted; the descriptor is closed.
    """
    name = f"{_DESCRIPTORS}/{'./' * next(_LOADED)}{descriptor}"
    try:
        require_descriptors()
        library = ctypes.CDLL(name, mode=mode)
    except (OSError, UsageError):
        os.close(descriptor)
        raise
    note_use(descriptor)
    return library


def note_use(descriptor: int) -> None:
    """Set the modification time of a file or folder to now, so that ``is_unused`` returns False.

    Files that belong to root are skipped.
    """
    with contextlib.suppress(OSError):
        if time.time() - os.fstat(descriptor).st_mtime > _DAY:
            os.utime(descriptor)


def is_unused(entry: os.DirEntry[str]) -> bool:
    """Return True if a file has not been loaded for a month."""
    with contextlib.suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _UNUSED
    return False


@contextlib.contextmanager
def locked(path: Path, remedy: str, waits: Callable[[], object], longest: float = -1) -> Iterator[None]:
    """Allow only one process at a time to run the ``with`` block.

    On a file system without locks, all processes are allowed.

    Args:
        path: the lock file, which is kept.
        remedy: how to select another folder.
        waits: called if another process is in the block.
        longest: the maximum number of seconds to wait; -1 means no limit.

    Raises:
        UsageError: the wait took longer, or the file cannot be created.
    """
    from filelock import FileLock, Timeout  # torch requires it; not above: every start imports this module

    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        waits()
        _wait(lock, longest, remedy)
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise unusable(path.parent, error, remedy) from error
    try:
        yield
    finally:
        lock.release()


def _wait(lock: BaseFileLock, longest: float, remedy: str) -> None:
    from filelock import Timeout

    try:
        lock.acquire(timeout=longest)
    except Timeout:
        raise UsageError(
            f"another process has held the lock {lock.lock_file} for {longest:.0f} s",
            remedy=(
                f"If it is not compiling any more, end it (fuser {lock.lock_file} prints its process ID) "
                f"and start again. {remedy}"
            ),
        ) from None
