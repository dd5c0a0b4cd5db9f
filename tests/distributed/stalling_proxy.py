"""A network that is cut: a proxy on this machine that forwards no more, and closes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def forwarding(port: int, until: Path) -> Iterator[int]:
    """Forward connections to a port of this machine until a file exists; give the proxy's own port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_accept, args=(server, port, until), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, port: int, until: Path) -> None:
    while True:
        try:
            guest, _ = server.accept()
        except OSError:  # it is closed
            return
        try:
            host = socket.create_connection(("127.0.0.1", port))
        except OSError:  # nobody listens yet, and the guest tries again
            guest.close()
            continue
        for source, target in ((guest, host), (host, guest)):
            threading.Thread(target=_copy, args=(source, target, until), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket, until: Path) -> None:
    try:
        while (data := source.recv(65536)) and not until.exists():
            target.sendall(data)
    except OSError:  # one of them has ended
        pass
    if not until.exists():
        target.close()
