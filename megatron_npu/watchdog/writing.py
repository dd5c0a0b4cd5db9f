"""Detect from I/O counters whether saving a checkpoint makes progress, and which file blocks it.

A hanging disk, a network file system without its server, or a lock that is never released makes a save wait
at one line of Python without using CPU time. A slow save also waits, but bytes are written. A load is judged
by the bytes read from a disk or network file system, because a process also reads from other sources.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_LEAST = 64 * 2**10  # bytes: less may be a log's
_LEAST_TO_DISK = 64 * 2**20  # of the whole machine, for one that waits for its disk: others write, too
_WRITTEN = ("wchar:", "write_bytes:")  # to files or their memory
_READ = ("read_bytes:",)  # from a disk: the watchdog itself reads, of other processes, from memory
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass
class Writing:
    """Detects progress in a save from the number of bytes written since the last progress."""

    _own: dict[int, int] | None = field(default=None)
    _to_disk: int = 0

    def forget(self) -> None:
        """Reset the measurement after the main thread has made progress."""
        self._own = None

    def gets_on(self, *, reads: bool = False) -> bool:
        """Return True if enough bytes were written since the last call that returned True.

        Args:
            reads: whether to count the bytes read instead.
        """
        processes, counted = _processes(), _READ if reads else _WRITTEN
        own, to_disk = {pid: _bytes_of(pid, counted) for pid in processes}, _written_to_disk()
        if self._own is None:
            self._own, self._to_disk = own, to_disk
            return False
        more = sum(max(0, count - self._own.get(pid, 0)) for pid, count in own.items())
        synced = (
            not reads and to_disk - self._to_disk >= _LEAST_TO_DISK and any(map(_waits_for_disk, processes))
        )
        if more < _LEAST and not synced:
            return False
        self._own, self._to_disk = own, to_disk
        return True


def current_file() -> str:
    """Return the file that is being written, and its size.

    The result is the file of a blocked call, or else the newest file.

    The result is empty if no file is open.
    """
    found: dict[str, os.stat_result] = {}
    for pid in _processes():
        files = dict(_open_files(pid))
        for waits_with in _descriptors_waited_with(pid):
            if waits_with in files:
                return _said(*files[waits_with])
        found.update(files.values())
    return _said(*max(found.items(), key=lambda each: each[1].st_mtime_ns)) if found else ""


def _said(path: str, status: os.stat_result) -> str:
    return f"{path} ({status.st_size:,} bytes)"


def _processes() -> list[int]:
    with contextlib.suppress(psutil.Error, OSError):
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return [os.getpid()]


def _bytes_of(pid: int, counted: tuple[str, ...]) -> int:
    """Return the number of bytes that a process and its terminated children have read or written."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(counted))
    return 0


def _written_to_disk() -> int:
    """Return the number of bytes that this machine has written to disks and network file systems."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("nr_written "):
                return int(line.split()[1]) * _PAGE
    return 0


def _threads(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _waits_for_disk(pid: int) -> bool:
    for thread in _threads(pid):
        with contextlib.suppress(OSError, IndexError):
            if (thread / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "D":
                return True
    return False


def _descriptors_waited_with(pid: int) -> Iterator[int]:
    """Yield the first argument of the current system call of each thread.

    For a write, it is the file descriptor.
    """
    for thread in _threads(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):  # one that runs is in none
            yield int((thread / "syscall").read_text(encoding="ascii").split()[1], 16)


def _open_files(pid: int) -> Iterator[tuple[int, tuple[str, os.stat_result]]]:
    """Yield the regular files that a process has opened for writing, by descriptor.

    Standard streams are excluded.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError):
                number, path, status = int(entry.name), os.readlink(entry.path), os.stat(entry.path)
                writes = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode) & stat.S_IWUSR
                if number > 2 and writes and stat.S_ISREG(status.st_mode) and status.st_nlink:
                    yield number, (path, status)
