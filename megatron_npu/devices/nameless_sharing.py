"""Pass tensors between processes in unnamed shared memory, which the system frees automatically.

torch puts such a tensor (a batch from a data-loader worker) into a file in /dev/shm and unlinks it in the
next call: a worker that is killed in between leaves the file, and its name does not show whether another
container uses it. A Python thread that listens on a socket in /tmp/pymp-* passes the descriptor: a worker
that is killed at any time leaves the socket behind. Here, the memory is an anonymous file (``memfd_create``),
which a small /dev/shm does not limit, and the socket is an abstract one, which is restricted to the same user
and authenticated with Python's key as before. Values and sharing semantics are unchanged.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from multiprocessing import process, resource_sharer, util
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch.storage import _share_memory_lock_protected

from megatron_npu.devices.base import Replacement

_Storage = torch.UntypedStorage


def replacements() -> Iterator[Replacement]:
    """Yield replacements for the functions of torch and Python that give names to shared memory (Linux
    only).
    """
    if sys.platform == "linux":
        yield _Storage, "_new_using_fd_cpu", staticmethod(_anonymous)
        if hasattr(_Storage, "_swap_data_ptr_"):  # older torches move a storage in C++ alone
            yield _Storage, "_share_fd_cpu_", _moving(_Storage._share_fd_cpu_)
        yield resource_sharer, "_resource_sharer", _Sharer()


def _anonymous(size: int) -> torch.UntypedStorage:
    """Return a storage of ``size`` bytes in unnamed shared memory.

    The storage keeps its own file descriptor.
    """
    descriptor = os.memfd_create("megatron_npu-tensor")
    try:
        os.ftruncate(descriptor, size)
        return _Storage._new_shared_fd_cpu(descriptor, size)  # type: ignore[attr-defined]  # it duplicates it
    finally:
        os.close(descriptor)


def _moving(original: Any) -> Any:
    """Return torch's sharing method, changed to move the storage to unnamed shared memory first."""

    @_share_memory_lock_protected
    def _share_fd_cpu_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu" and self.nbytes() and not self.is_shared():
            memory = _anonymous(self.nbytes())
            memory.copy_(self)
            self._swap_data_ptr_(memory)  # of all tensors that have this storage
        return original(self, *args, **kwargs)

    return _share_fd_cpu_


class _Sharer(resource_sharer._ResourceSharer):  # type: ignore[name-defined,misc]
    """Python's resource sharer, changed to use an abstract socket.

    A receiver that has disconnected is ignored.
    """

    def _start(self) -> None:
        """Start a thread that listens for requests for resources."""
        self._address = f"\0megatron_npu-{os.getpid()}-{secrets.token_hex(8)}"  # unix(7), abstract
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
        goes_on = True
        while goes_on:
            try:
                goes_on = self._hand_over(*self._listener.accept())
            except (EOFError, ConnectionError):
                pass  # it has ended, and needs nothing more
            except Exception:
                if not util.is_exiting():
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]

    def _hand_over(self, accepted: socket.socket, _: object) -> bool:
        """Send the requested resource to the receiver.

        Return False if the thread is asked to stop.
        """
        with Connection(accepted.detach()) as other:
            if _user_at(other) != os.geteuid():  # an abstract socket has no permissions
                return True
            key = process.current_process().authkey
            deliver_challenge(other, key)
            answer_challenge(other, key)
            if (asked := other.recv()) is None:
                return False
            number, receiver = asked
            send, close = self._cache.pop(number)
            try:
                send(other, receiver)
            finally:
                close()
        return True


def _user_at(connection: Connection) -> int:
    """Return the id of the user whose process is connected, as reported by the kernel."""
    with socket.socket(fileno=os.dup(connection.fileno())) as there:
        found = there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", found)[1]
