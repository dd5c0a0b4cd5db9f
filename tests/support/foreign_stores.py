"""Programs that are not the store of a run, at the address of one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_PING = struct.Struct("=BIBI")  # of torch's TCPStore since 2.4
Behaviour = Callable[[socket.socket], object]


def answering(connection: socket.socket, more: int) -> None:
    """Answer a ping of torch's store, then so many messages with eight zero bytes, then nothing."""
    with contextlib.suppress(OSError):
        got = b""
        while len(got) < _PING.size:
            part = connection.recv(_PING.size - len(got))
            if not part:
                return
            got += part
        connection.sendall(got[-4:])
        for _ in range(more):
            if not connection.recv(4096):
                return
            connection.sendall(bytes(8))
        while connection.recv(4096):
            pass


@contextlib.contextmanager
def serving(behave: Behaviour) -> Iterator[int]:
    """Serve a port of a program that is not a store."""
    held: list[socket.socket] = []

    def one(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            behave(connection)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(server.accept()[0])
                threading.Thread(target=one, args=(held[-1],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in held:
                each.close()
