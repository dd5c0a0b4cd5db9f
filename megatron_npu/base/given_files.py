"""Read files that the user names, which may be regular files or pipes but not endless devices such as
/dev/zero.

For a file in a folder that may be from another user, use ``files.regular``, which rejects pipes too.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

from megatron_npu.base import files

PIPE_WAIT_S = 30.0  # for the first byte of a pipe
_TERMINALS = (4, 5, *range(136, 144))  # the major numbers of consoles, /dev/tty and /dev/pts


def opened(path: str | Path) -> BinaryIO:
    """Open a file that the user named for reading: a regular file, or a pipe such as the shell's ``<(...)``.

    Raises:
        OSError: the file does not exist, is a device or a folder, or is a pipe to which nothing is written.
    """
    stream = open(path, "rb", opener=files.without_waiting)  # noqa: SIM115  # the caller closes it
    try:
        if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            poll = select.poll()
            poll.register(stream, select.POLLIN | select.POLLHUP)
            if not poll.poll(PIPE_WAIT_S * 1000):
                said = f"it is a pipe to which nothing has been written for {PIPE_WAIT_S:g} s"
                raise OSError(errno.EINVAL, said, str(path))
        elif not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "the path is neither a regular file nor a pipe", str(path))
        os.set_blocking(stream.fileno(), True)
    except BaseException:
        stream.close()
        raise
    return stream


def text(path: str | Path) -> str:
    """Return the content of a file that the user named and that is encoded in UTF-8; see ``opened``."""
    with opened(path) as stream:
        return stream.read().decode("utf-8")


def is_device(path: str | Path) -> bool:
    """Return True if a path is a socket, or a device whose content never ends, such as /dev/zero.

    Terminals and /dev/null, to which results may be written, do not count.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return False
    if stat.S_ISCHR(status.st_mode):
        ends = os.major(status.st_rdev) in _TERMINALS or status.st_rdev == os.stat(os.devnull).st_rdev
        return not ends
    return stat.S_ISBLK(status.st_mode) or stat.S_ISSOCK(status.st_mode)


def lines(path: str | Path) -> list[str]:
    """Split a UTF-8 text into lines at line feeds and carriage returns only, as editors and JSON do.

    ``str.splitlines`` would also split at U+2028, U+0085 and others, which occur inside lines of text.
    """
    with io.TextIOWrapper(opened(path), encoding="utf-8") as stream:
        return [line.removesuffix("\n") for line in stream]
