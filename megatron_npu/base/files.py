"""Create files and folders atomically and privately. Imports only the standard library.

What is being written has a temporary name beside its final one, so that renaming it is one step for the file
system: ``NAME.PID.partial`` for a file, ``.NAME.partial`` for a folder. A folder that another one replaces is
``.NAME.replaced`` until that one is instead. Modes follow the user's umask.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

_REPLACED = ".replaced"
PRIVATE = 0o027  # what is taken from the modes of new files and folders: the group's write, all of others'


def tighten_umask() -> int:
    """Take no less than ``PRIVATE`` from the modes of what this process makes; return the umask before.

    A tighter umask of the user stays.
    """
    former = os.umask(0o077)  # only setting it tells what it was
    os.umask(former | PRIVATE)
    return former


def lines(path: str | Path) -> list[str]:
    """Return the lines of a text in UTF-8, each ended by a line feed (or CR, or both) as in editors and JSON.

    ``str.splitlines`` would also cut at U+2028, U+0085 and others, which texts have inside of their lines.
    """
    with open(path, encoding="utf-8") as stream:
        return [line.removesuffix("\n") for line in stream]


def partial_file(path: Path) -> Path:
    """Return the temporary name of a file; it has the process's number, so that ranks do not meet."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def partial_folder(path: Path) -> Path:
    """Return the temporary name of a folder, the same for all ranks that write into it."""
    return path.with_name(f".{path.name}.partial")


def claim(stream: IO[bytes]) -> None:
    """Mark an open temporary file as being written; the mark ends with the process, however it ends.

    A file system without locks gives no mark, and ``remove_abandoned`` leaves its files alone.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(path: Path) -> list[Path]:
    """Remove the temporary files of ``path`` that killed processes have left, and return their names.

    Only those that were claimed while they were written may be given here: a file without a mark is removed.
    """
    removed = []
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        number = partial.name.removeprefix(f"{path.name}.").removesuffix(".partial")
        if number.isdecimal() and not partial.is_symlink() and _is_abandoned(partial):
            partial.unlink(missing_ok=True)
            removed.append(partial)
    return removed


def _is_abandoned(partial: Path) -> bool:
    try:
        with open(partial, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody holds it, or nobody can say
        return False
    return True


def refusal(folder: Path) -> str:
    """Return why no file can be made in a folder that is there; empty where one can.

    A file without a name is made: ``os.access`` says yes to root of folders such as /proc, which take none.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or "no reason given"
    return ""


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file that is at any time either the old one or the whole new one.

    Args:
        path: its final name.
        content: text is encoded as UTF-8.
    """
    with writing(path) as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)


def name(error: BaseException | None, path: str | Path) -> None:
    """Add the file's name to errors of the system in the block that lack it."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a binary stream; its content becomes ``path`` if the block succeeds, else it is removed."""
    path = Path(path)
    partial = partial_file(path)
    remove_abandoned(path)
    try:
        with open(partial, "wb") as stream:
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
    """Yield an empty folder that becomes ``path`` if the block succeeds, else it is removed.

    What an attempt that was killed has left is removed first. Only one process may do this at a time.

    Args:
        path: its final name.
        replace: a folder of that name gives way when the new one is complete. Killed between the two steps
            of that, it is back by its name when this, or ``restore_replaced``, is called again.

    Raises:
        OSError: ``path`` exists and is not an empty folder, and is not to be replaced.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(path)
    shutil.rmtree(partial, ignore_errors=True)
    restore_replaced(path.parent, glob.escape(path.name))
    partial.mkdir()
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
    """Move a folder to a path, replacing an existing one.

    Args:
        path: the place. Killed between two steps, it is there again after ``restore_replaced``.
        new: the folder, on the same file system.

    Raises:
        OSError: it cannot be put there; the old one stays.
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
    """Restore the names of folders that were to be replaced; remove those whose names are taken.

    Args:
        parent: where they are.
        names: a pattern of those meant.
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
    """Bring what was written to a file to disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
