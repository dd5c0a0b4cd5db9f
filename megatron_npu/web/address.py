"""Parse the address ``[HOST:]PORT`` on which a server listens.

All commands write an address in this form: ``serve --port``, ``dashboard --port``, ``pretrain --dashboard``.
This module imports only the standard library and no server package.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from megatron_npu.base import digits
from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed

LOOPBACK = "127.0.0.1"
_WAITING = 128  # connections that wait to be taken


class Address(NamedTuple):
    """A host name or IP address, and a port.

    Port 0 selects any free port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(text: str) -> Address:
    """Parse an address of the form ``[HOST:]PORT``.

    This function can be passed as ``type`` to ``add_argument``.

    Raises:
        Unfit: ``text`` is not an address.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = digits.number(port)
    if number is None or number > 65535:
        raise Unfit(text, "a port from 0 to 65535, or HOST:PORT")
    return Address(host or LOOPBACK, number)


def listening(given: str, wanted: Address) -> socket.socket:
    """Return a socket that listens on the given address.

    Args:
        given: the address as the user typed it, such as ``--port 127.0.0.1:80``.
        wanted: the parsed address.

    Raises:
        UsageError: the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
    try:
        return socket.create_server(wanted, family=family, backlog=_WAITING)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {given}: {error.strerror or error}. It must be an address of this machine "
            f"with a free port. Use another port (0 selects any free one), or the host {LOOPBACK}."
        ) from error


def url(sock: socket.socket) -> str:
    """Return the URL of a server for use in a browser on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def require_packages(asking: str) -> None:
    """Check that the packages for serving HTTP are installed.

    Args:
        asking: the flag or command that requires the packages.

    Raises:
        UsageError: a package is missing.
    """
    missing = [name for name in ("starlette", "uvicorn") if not is_installed(name)]
    if missing:
        names = " and ".join(missing)
        raise UsageError(
            f"{asking} requires the packages {names}, which are not installed. Install them: pip install "
            f"{' '.join(missing)}"
        )
