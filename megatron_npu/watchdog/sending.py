"""Detect whether a client of an object storage sends the data of a checkpoint.

The main thread then waits at one line of Python, and the client's threads may use little CPU time, because a
slow network has little to send. The kernel counts bytes sent through a socket for the socket only, not for
the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_CLIENTS = ("fsspec.", "multistorageclient.")
_LEAST = 64 * 2**10  # bytes a second: heartbeats are fewer
_ACKED = 120  # the offset of tcpi_bytes_acked in Linux's tcp_info, a number of 8 bytes


def by_client(frames: Sequence[str]) -> bool:
    """Return True if one of the stack frames of ``place.Place`` is a storage client's."""
    return any(frame.startswith(_CLIENTS) for frame in frames)


@dataclass
class Sending:
    """Compare the bytes that peers have acknowledged with those at the previous call."""

    _at: float = 0.0
    _sockets: dict[int, int] | None = field(default=None)

    def forget(self) -> None:
        """Reset the measurement after the main thread has made progress."""
        self._sockets = None

    def gets_on(self) -> bool:
        """Return True if enough bytes per second were sent since the previous call."""
        now, before = time.monotonic(), self._sockets
        seconds, self._at = now - self._at, now
        self._sockets = dict(_acknowledged())
        if before is None:
            return False
        more = sum(count - before.get(inode, 0) for inode, count in self._sockets.items())
        return more >= _LEAST * seconds


def _acknowledged() -> Iterator[tuple[int, int]]:
    """Yield the inode of each TCP socket of this process, and the bytes that its peer has acknowledged."""
    with contextlib.suppress(OSError):  # no Linux
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, struct.error):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:["):
                    yield int(link[8:-1]), _acked(int(name))


def _acked(descriptor: int) -> int:
    """Return the bytes that the peer of a TCP socket has acknowledged.

    Raises:
        OSError: it is another kind of socket, or not connected.
        struct.error: the kernel is older than 4.1, and does not count them.
    """
    with socket.socket(fileno=os.dup(descriptor)) as same:
        told = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED + 8)
    return int(struct.unpack_from("=Q", told, _ACKED)[0])
