"""Determine the address that gloo uses on this machine, and whether other addresses can be reached."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from megatron_npu.base.errors import UsageError
from megatron_npu.process import meeting_place

INTERFACE = "GLOO_SOCKET_IFNAME"
HCCL = "HCCL_IF_IP"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
Address = tuple[str, int]


def machine() -> str:
    """Return an identifier of this machine's network namespace, within which the loopback address works.

    The identifier is empty if unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def own_address() -> str:
    """Return the address to which gloo binds.

    The address belongs to ``GLOO_SOCKET_IFNAME`` or else to the host name.

    Raises:
        UsageError: the interface does not exist.
    """
    name = os.environ.get(INTERFACE, "").partition(",")[0]
    if name:
        return _of_interface(name)
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(place)
                return str(place[0])
    return "127.0.0.1"  # as torch


def hccl_address() -> str:
    """Return the address configured for HCCL if this process has loaded torch_npu, or else an empty string.

    Raises:
        UsageError: it is not an address of this machine.
    """
    given = os.environ.get(HCCL, "") if "torch_npu" in sys.modules else ""
    if given and not meeting_place.is_of_this_machine(given):
        raise UsageError(
            f"{HCCL}={given} is not an address of {socket.gethostname()}, whose addresses are: "
            f"{', '.join(interfaces().values()) or 'none'}",
            remedy=f"Export the address of this machine in the cluster's network, or unset {HCCL}.",
        )
    return given


def _of_interface(name: str) -> str:
    found = [each.address for each in psutil.net_if_addrs().get(name, []) if each.family in _FAMILIES]
    if not found:
        raise UsageError(
            f"{INTERFACE} is set to {name}, which is not an interface with an address on "
            f"{socket.gethostname()}; the interfaces with an address are: "
            f"{', '.join(interfaces()) or 'none'}",
            remedy="Export the interface of the cluster's network.",
        )
    return found[0].partition("%")[0]


def interfaces() -> dict[str, str]:
    """Return the addresses of this machine's network interfaces, except loopback, keyed by interface name."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            text = each.address.partition("%")[0]
            if each.family in _FAMILIES and not is_private_to_the_machine(text):
                found.setdefault(name, text)
    return found


def is_private_to_the_machine(address: str) -> bool:
    """Return True if an address cannot be reached from other machines."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified


def towards(host: str) -> tuple[str, str] | None:
    """Return the interface (name and address) through which this machine reaches a host, or None if
    unknown.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as trial:
                trial.connect(place)  # which sends nothing
                own = str(trial.getsockname()[0])
            return next(((name, own) for name, address in interfaces().items() if address == own), None)
    return None


def listening(address: str) -> socket.socket:
    """Return a socket that listens on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    result = socket.socket(family, socket.SOCK_STREAM)
    result.bind((address, 0))
    result.listen(128)
    return result


def unreached(places: Mapping[str, Address], seconds: float) -> dict[str, str]:
    """Try to connect to several addresses at the same time, and return the reasons for failures.

    Return the failures with their reasons.

    Args:
        places: the addresses and ports, by name.
        seconds: how long to try.
    """
    faults: dict[str, str] = {}
    with selectors.DefaultSelector() as waiting:
        for name, (address, port) in places.items():
            trial = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            trial.setblocking(False)
            error = trial.connect_ex((address, port))
            if error in (0, errno.EINPROGRESS):
                waiting.register(trial, selectors.EVENT_WRITE, name)
            else:  # the system knows already that there is no way
                faults[name] = os.strerror(error)
                trial.close()
        end = time.monotonic() + seconds
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                trial = key.fileobj  # type: ignore[assignment]
                if error := trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    faults[key.data] = os.strerror(error)
                waiting.unregister(trial)
                trial.close()
        for key in [*waiting.get_map().values()]:
            faults[key.data] = f"no answer within {seconds:.0f} s"
            key.fileobj.close()  # type: ignore[union-attr]
    return faults
