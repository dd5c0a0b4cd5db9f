"""A port for what a test starts."""

from __future__ import annotations

import contextlib
import random
import socket
from itertools import chain

# Below what Linux gives to connections (net.ipv4.ip_local_port_range, from 32768 on): a port from there may
# be somebody's by the time it is listened on, gloo's of a run beside this one for instance.
_PORTS = range(20_000, 32_000)
_held: list[socket.socket] = []  # until this process ends: nobody else gets the port from here meanwhile


def free_port() -> int:
    """Return a port of 127.0.0.1 that no other call has returned, in whatever process that is alive.

    This process stays bound to it, without listening. On Linux a server may listen on it all the same, as it
    asks for SO_REUSEADDR (torch's store, asyncio's and Python's servers do); another call does not, and is
    refused.

    Raises:
        OSError: there is none.
    """
    first = random.SystemRandom().randrange(len(_PORTS))  # not of the run's generator: the model's numbers
    for port in chain(_PORTS[first:], _PORTS[:first]):
        holder = socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after, not before: see above
            _held.append(holder)
            return port
        holder.close()
    raise OSError(f"no free port of 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1}")
