"""Where the processes of a run meet, when no launcher has said so."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from itertools import chain

# Below what Linux gives to connections (net.ipv4.ip_local_port_range, from 32768 on): a port from there may
# be somebody's by the time it is listened on, gloo's of a run beside this one for instance.
_PORTS = range(20_000, 32_000)


def provide_address() -> None:
    """Give a process that is alone the address of its store, which torchrun gives to several.

    Both upstreams call ``init_process_group`` with ``env://``; ``python pretrain_gpt.py`` without a launcher
    would end there, asking for MASTER_ADDR.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", str(free_port()))


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
