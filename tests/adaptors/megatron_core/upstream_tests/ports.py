"""A port for what a test starts."""

from __future__ import annotations

import contextlib
import random
import socket
from itertools import chain

# Below what Linux gives to connections (net.ipv4.ip_local_port_range, from 32768 on): a port from there may
# be somebody's by the time it is listened on, gloo's of a run beside this one for instance.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of this machine on which nobody listens.

    Raises:
        OSError: there is none.
    """
    first = random.SystemRandom().randrange(len(_PORTS))  # not of the run's generator: the model's numbers
    for port in chain(_PORTS[first:], _PORTS[:first]):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port of 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1}")
