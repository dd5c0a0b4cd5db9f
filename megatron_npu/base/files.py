"""Create files and folders atomically and with private permissions.

This module imports only the standard library and ``claimed_folder``.

A file that is being written has a temporary name beside its final name, so that it appears in one atomic
rename: ``NAME.PID.partial`` for a file, ``.NAME.partial`` for a folder. A folder that is being replaced is
called ``.NAME.replaced`` in the meantime. Modes follow the user's umask.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import glob
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from megatron_npu.base import claimed_folder

_REPLACED = ".replaced"
_ROOT = 0
PRIVATE = 0o027  # what is taken from the modes of new files and folders: the group's write, all of others'


def tighten_umask() -> int:
    """Remove at least the permissions in ``PRIVATE`` from files that this process creates.

    Return the previous umask. A stricter user umask is kept.
    """
    former = os.umask(0o077)  # only setting it tells what it was
    os.umask(former | PRIVATE)
    return former


def nearest(path: str | Path) -> str:
    """Suggest, for a path that does not exist, a file with its name one folder below, or a similar name.

    The result is the advice to check the path if there is no such file.
    """
    path = Path(path)
    try:
        below = sorted(one for one in path.parent.glob(f"*/{glob.escape(path.name)}") if one.is_file())
        names = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    except OSError:
        below, names = [], []
    near = below or [path.parent / name for name in difflib.get_close_matches(path.name, names, n=1)]
    return f"Did you mean {near[0]}?" if near else "Check the path."


def partial_file(path: Path) -> Path:
    """Return the temporary name under which a file is written.

    The name contains the process id, so that ranks do not collide.

    Raises:
        OSError: the path is empty, or is the working directory or the root.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, "a file cannot be written at this path", str(path))
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def partial_folder(path: Path) -> Path:
    """Return the temporary name of a folder, which is the same on all ranks that write to it."""
    return path.with_name(f".{path.name}.partial")


def created(path: str | Path, mode: int = 0o666, buffering: int = -1) -> BinaryIO:
    """Create a file, replacing an existing one, and open it for writing.

    Symbolic links are not followed.

    In a folder that several users can write to, another user can guess a temporary name and put a link there.

    Args:
        path: the file.
        mode: the mode, from which the umask is taken.
        buffering: the size of the buffer, as for ``open``.

    Raises:
        OSError: what has the name cannot be removed, or another user puts it there again.
    """
    Path(path).unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering)


def claim(stream: IO[bytes]) -> None:
    """Lock an open temporary file, which marks it as being written.

    The lock is released when the process ends.

    On a file system without locks, nothing is locked, and ``remove_abandoned`` keeps the files.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(path: Path) -> list[Path]:
    """Remove the temporary files of ``path`` that killed processes have left behind.

    Return the removed names.

    Use this only for files that their writers lock (``claim``): unlocked files are removed.
    """
    removed = []
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        number = partial.name.removeprefix(f"{path.name}.").removesuffix(".partial")
        if number.isdecimal() and _is_abandoned(partial):
            partial.unlink(missing_ok=True)
            removed.append(partial)
    return removed


def _is_abandoned(partial: Path) -> bool:
    """Return True if a temporary file is a regular file that is not locked by any process.

    Pipes are not opened.
    """
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:  # somebody holds it, or nobody can say
        return False
    finally:
        os.close(descriptor)


def refusal(folder: Path) -> str:
    """Return the reason why no file can be created in an existing folder, or an empty string.

    This function creates an unnamed file, because ``os.access`` returns True for root even in folders such as
    /proc.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or "no reason given"
    return ""


def own_opener(path: str, flags: int) -> int:
    """Open a file, as in ``open(..., opener=own_opener)``, without following a link that another user
    created.

    In a folder that several users can write to, such a link could make this user overwrite their own files.

    Raises:
        PermissionError: the file is a link or a pipe that another user created.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            _require_no_pipe_of_others(os.stat(path), path)
            return os.open(path, flags, 0o666)
        if error.errno != errno.ELOOP:
            raise
    else:
        try:
            _require_no_pipe_of_others(os.fstat(descriptor), path)
            os.set_blocking(descriptor, True)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if is_of_others(os.fstat(link)):
            raise PermissionError(errno.EACCES, "the path is a link that another user has created", path)
        target = os.readlink("", dir_fd=link)  # of this very link, whatever has its name now
    finally:
        os.close(link)
    return os.open(os.path.join(os.path.dirname(path), target), flags, 0o666)


def _require_no_pipe_of_others(status: os.stat_result, path: str) -> None:
    if stat.S_ISFIFO(status.st_mode) and is_of_others(status):
        raise PermissionError(errno.EACCES, "the path is a pipe that another user has created", path)


def without_waiting(path: str, flags: int) -> int:
    """Open a file, as in ``open(..., opener=without_waiting)``, without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def regular(path: str | Path) -> BinaryIO:
    """Open a file for reading after checking that it is a regular file.

    Use this function for files in folders that another user may own.

    Opening a pipe would wait for its writer, which may never come.

    Raises:
        OSError: the file does not exist, or is not a regular file.
    """
    stream = open(path, "rb", opener=without_waiting)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
    return stream


def text(path: str | Path) -> str:
    """Return the content of a regular file that is encoded in UTF-8; see ``regular``."""
    with regular(path) as stream:
        return stream.read().decode("utf-8")


def others(path: str | Path) -> str:
    """Return the reason why another user may have written a file or folder, or an empty string.

    The reason is part of an error message. Root and the current user do not count.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ""
    if is_of_others(status):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by anyone"
    shared = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    return f"can be written by group {status.st_gid}" if shared else ""


def is_of_others(status: os.stat_result) -> bool:
    """Return True if a file belongs to neither root nor the current user."""
    return status.st_uid not in (os.geteuid(), _ROOT)


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return True if the mode of a file grants write access to other users.

    The owner, root, root's group and the user's private group do not count as others.
    """
    group = status.st_mode & stat.S_IWGRP and status.st_gid != _ROOT and not _is_private(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or group)


def _is_private(group: int) -> bool:
    """Return True if a group is the user's private group, which has the user's name and no other members."""
    try:
        own, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == own and not set(found.gr_mem) - {own}


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically.

    At any time, the path has either its old content or the complete new content.

    Args:
        path: the final name of the file.
        content: the content; a string is encoded as UTF-8.
    """
    with writing(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


def name(error: BaseException | None, path: str | Path) -> None:
    """Add the name of the file to operating-system errors in the ``with`` block that do not name a file."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary stream whose content becomes the file ``path`` if the ``with`` block succeeds.

    If the block fails, the content is removed.
    """
    path = Path(path)
    partial = partial_file(path)
    remove_abandoned(path)
    try:
        with created(partial) as stream:
            claim(stream)
            yield stream
            sync(stream)
        os.replace(partial, path)
    except OSError as error:
        name(error, path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def new_folder(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is moved to ``path`` if the ``with`` block succeeds and removed if it fails.

    The leftovers of a killed attempt are removed first. Only one process at a time can write to a path; on a
    file system without locks, this is not checked.

    Args:
        path: the final name of the folder.
        replace: whether to replace an existing folder once the new one is complete. If the process is killed
            between the two renames, the next call of this function or of ``restore_replaced`` restores the
            old folder.

    Raises:
        OSError: ``path`` exists and is not an empty folder, and ``replace`` is False; or another process is
            writing to ``path``.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(path)
    if partial.is_dir() and not partial.is_symlink():
        with claimed_folder.locked(partial, path):
            shutil.rmtree(partial, ignore_errors=True)
    restore_replaced(path.parent, glob.escape(path.name))
    partial.mkdir()
    with claimed_folder.locked(partial, path):
        try:
            yield partial
            if replace:
                replace_folder(path, partial)
            else:
                os.replace(partial, path)
                sync_directory(path.parent)
        except OSError as error:
            name(error, path)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def replace_folder(path: Path, new: Path) -> None:
    """Move a folder to a path, replacing an existing folder.

    Args:
        path: the destination. If the process is killed between the two renames, ``restore_replaced`` restores
            the old folder.
        new: the folder to move, on the same file system.

    Raises:
        OSError: the folder cannot be moved; the old folder is kept.
    """
    restore_replaced(path.parent, glob.escape(path.name))
    try:
        if path.is_dir() and not path.is_symlink():
            os.replace(path, _replaced_folder(path))
        os.replace(new, path)
    finally:
        restore_replaced(path.parent, glob.escape(path.name))
    sync_directory(path.parent)


def restore_replaced(parent: Path, names: str = "*") -> None:
    """Complete replacements of folders that were interrupted.

    Restore a folder whose replacement was interrupted, and remove an old folder whose replacement is
    complete.

    Args:
        parent: the folder that contains them.
        names: a pattern for the folder names to consider.
    """
    for replaced in parent.glob(_replaced_folder(Path(names)).name):
        path = parent / replaced.name.removeprefix(".").removesuffix(_REPLACED)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.replace(replaced, path)


def _replaced_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}{_REPLACED}")


def sync(stream: IO[bytes]) -> None:
    """Flush a written file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
